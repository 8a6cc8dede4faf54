"""The operations of a policy on one image at a time: what a CPU runs, and the reference of the Triton kernels.

A CPU gains nothing from batches; it gains from bytes, from tables, and from memory that stays in its cache. Each part
uses the library that is fastest at it: numpy gathers, torch computes, Pillow counts, rotates and blurs. All of them
release Python's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageFilter
from torch import Tensor

from fathoms.data.augment.policies import Layer

Pixels = UInt8[np.ndarray, "3 H W"]
Fill = UInt8[np.ndarray, "3"]
Table = UInt8[np.ndarray, "c 256"]

# Added before a fraction is cut off: a product or a sum of up to sixteen taps that should be whole may come out just
# below it in float32, where Pillow computes in float64.
CUT_MARGIN = 1e-3
# Added before rounding down in hue and blur: these numbers are rounded on the way to the result, so it must be less
# than any true fraction there, and float32 is off by less.
ROUND_MARGIN = 1e-4
PLANE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
_RAMP = torch.arange(256)


def luma(pixels: Float[Tensor, "3 H W"]) -> Float[Tensor, "H W"]:
    """Luma as Pillow rounds it, whole numbers in float32. All sums stay below 2 ** 24, hence are exact."""
    red, green, blue = pixels
    total = (red * 19595.0).add_(green, alpha=38470).add_(blue, alpha=7471).add_(0x8000)
    return total.mul_(2.0**-16).floor_()


def to_bytes(values: Float[Tensor, "..."]) -> UInt8[np.ndarray, "..."]:
    """Clip to a byte and drop the fraction, as Pillow's C code does; `values` is overwritten."""
    # numpy converts float32 to uint8 four times as fast as torch.
    return values.add_(CUT_MARGIN).clamp_(0, 255).numpy().astype(np.uint8)


def look_up(image: Pixels, table: Table) -> Pixels:
    """Replace every value by its entry in the table, the same for all channels or one for each."""
    if len(table) == 1:
        return np.take(table[0], image)
    return np.stack([np.take(own, plane) for own, plane in zip(table, image, strict=True)])


def _posterize(values: np.ndarray, factor: float | np.ndarray) -> np.ndarray:
    dropped = 8 - np.clip(np.asarray(factor).astype(np.int64), 0, 8)
    return values & (0xFF << dropped & 0xFF).astype(np.uint8)


# What becomes of a value, whatever the rest of the image: the strength may be an array, for the tables of many images.
POINTWISE: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "invert": lambda values, _: ~values,
    "posterize": _posterize,
    # From the threshold up a value is inverted; a bit that is set twice is clear again.
    "solarize": lambda values, factor: values ^ ((values >= factor) * np.uint8(255)),
    "solarize_add": lambda values, factor: values + (values < 128) * np.asarray(factor).astype(np.uint8),
    "brightness": lambda values, factor: np.clip(values * factor + CUT_MARGIN, 0, 255).astype(np.uint8),
}


def contrast(image: Pixels, factor: float) -> Pixels:
    """Stretch about the mean luma m, a whole number: m + factor * (v - m)."""
    total = int(luma(torch.from_numpy(image).float()).sum(dtype=torch.float64))
    pixels = image[0].size
    mean = torch.tensor((2 * total + pixels) // (2 * pixels), dtype=torch.float32)
    return look_up(image, to_bytes(mean + torch.tensor(factor) * (_RAMP - mean))[None])


def auto_contrast(image: Pixels, _: float) -> Pixels:
    """Stretch each channel from its own darkest and brightest value to 0..255."""
    planes = image.reshape(3, -1)
    dark, bright = (torch.from_numpy(edge)[:, None].double() for edge in (planes.min(1), planes.max(1)))
    scale = 255.0 / (bright - dark).clamp(min=1)
    stretched = (_RAMP * scale - dark * scale).clamp(0, 255).to(torch.uint8)
    return look_up(image, torch.where(bright > dark, stretched, _RAMP.to(torch.uint8)).numpy())


def equalize(image: Pixels, _: float) -> Pixels:
    """Spread the values of each channel so that they are equally frequent."""
    count = torch.tensor([Image.fromarray(plane).histogram() for plane in image])
    # Pillow divides all pixels but those of the brightest value that occurs into 255 steps.
    brightest = torch.where(count > 0, _RAMP, 0).amax(1, keepdim=True)
    step = (count.sum(1, keepdim=True) - count.gather(1, brightest)) // 255
    before = count.cumsum(1) - count
    spread = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    return look_up(image, torch.where(step > 0, spread, _RAMP).to(torch.uint8).numpy())


def colour(image: Pixels, factor: float) -> Pixels:
    """Saturation: g + factor * (v - g), with g the luma of the pixel: 0 is grey, 1 no change."""
    pixels = torch.from_numpy(image).float()
    shades = luma(pixels)
    return to_bytes(pixels.sub_(shades).mul_(factor).add_(shades))


def sharpness(image: Pixels, factor: float) -> Pixels:
    """Blend with a smoothed copy: s + factor * (v - s), with s a 3 x 3 smoothing; the outermost pixels stay."""
    values = torch.from_numpy(image).to(torch.int16)
    rows = (values[:, :-2] + values[:, 1:-1]).add_(values[:, 2:])
    total = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
    middle = values[:, 1:-1, 1:-1]
    smooth = total.add_(middle, alpha=4).float().add_(6.5).mul_(1 / 13).floor_()
    out = image.copy()
    out[:, 1:-1, 1:-1] = to_bytes(smooth.lerp_(middle.float(), factor))
    return out


def hue(image: Pixels, factor: float) -> Pixels:
    """Rotate the hue by `factor` of a full circle (-0.5 to 0.5); hue and saturation rounded to bytes."""
    red, green, blue = pixels = torch.from_numpy(image).float()
    high, low = pixels.amax(0), pixels.amin(0)
    span = high - low
    safe = span.clamp(min=1)
    toward_red, toward_green, toward_blue = ((high - c) / safe for c in (red, green, blue))
    angle = torch.where(
        red == high,
        toward_blue - toward_green,
        torch.where(green == high, 2 + toward_red - toward_blue, 4 + toward_green - toward_red),
    )
    turns = torch.where(span > 0, (angle / 6 + 1) % 1.0, 0.0)
    # Pillow keeps hue and saturation in a byte each, and so must we to end at the same colours.
    hue_byte = (turns * 255 + ROUND_MARGIN).floor()
    hue_byte = (hue_byte + int(np.float32(factor) * np.float32(255))) % 256
    saturation = torch.where(high > 0, (span * 255 / high.clamp(min=1) + ROUND_MARGIN).floor(), 0.0) / 255
    sector = hue_byte * (6 / 255)
    index = sector.floor()
    fraction = sector - index
    down = (high * (1 - saturation)).round()
    falling = (high * (1 - saturation * fraction)).round()
    rising = (high * (1 - saturation * (1 - fraction))).round()
    which = (index.long() % 6)[None]
    table = torch.stack([high, falling, down, down, rising, high])
    # Around the circle each channel takes the same six values, two sectors apart.
    picked = [table.gather(0, (which + turn) % 6) for turn in (0, 4, 2)]
    return to_bytes(torch.cat(picked))


def _to_pillow(image: Pixels) -> Image.Image:
    # Pillow merges and splits planes several times as fast as numpy transposes them.
    return Image.merge("RGB", [Image.fromarray(plane) for plane in image])


def _from_pillow(pillow: Image.Image) -> Pixels:
    return np.stack([np.asarray(plane) for plane in pillow.split()])


def gaussian_blur(image: Pixels, factor: float) -> Pixels:
    return _from_pillow(_to_pillow(image).filter(ImageFilter.GaussianBlur(factor)))


def matrices(kind: str, factor: Float[np.ndarray, " B"], height: int, width: int) -> Float[np.ndarray, "B 6"]:
    """Matrix (a, b, c, d, e, f) of each sample: the colour of (x, y) is found at (ax + by + c, dx + ey + f).

    Zero is the left or upper edge. `factor` is an angle in degrees, counter-clockwise about the middle, the
    tangent of a shear from the top or left, or the share of the width or height to move left or up.
    """
    if kind == "rotate":
        angle = -np.deg2rad(factor)
        cos, sin, x, y = np.cos(angle), np.sin(angle), width / 2, height / 2
        return np.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], 1)
    out = np.tile(np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]), (len(factor), 1))
    column, scale = {
        "shear_x": (1, 1),
        "shear_y": (3, 1),
        "translate_x": (2, width),
        "translate_y": (5, height),
    }[kind]
    out[:, column] = factor * scale
    return out


def tap_weights(d: Float[Tensor, "*shape"], taps: int) -> list[Float[Tensor, "*shape"]]:
    """Weights of the two (linear) or four (cubic) neighbours of a point that lies `d` past a pixel centre."""
    if taps == 2:
        return [1 - d, d]
    return [d * (-1 + d * (2 - d)), 1 + d * d * (d - 2), d * (1 + d * (1 - d)), d * d * (d - 1)]


def _edged(image: Pixels) -> UInt8[np.ndarray, "3 H w"]:
    """The rows with their ends repeated twice: every neighbour that a point inside can have."""
    out = np.empty((*image.shape[:2], image.shape[2] + 4), np.uint8)
    out[..., 2:-2], out[..., :2], out[..., -2:] = image, image[..., :1], image[..., -1:]
    return out


def shift_rows(image: Pixels, shift: Float[np.ndarray, " H"], cubic: bool, fill: Fill) -> Pixels:
    """Row y of the result is row y of the image moved left by shift[y] pixels.

    The fraction of the shift is the same along a row, so each row is gathered once and its neighbours
    are slices of it.
    """
    _, height, width = image.shape
    base = np.floor(shift)
    weights = tap_weights(torch.from_numpy((shift - base).astype(np.float32))[:, None], 4 if cubic else 2)
    taps = len(weights)
    first = base.astype(np.int64) + (3 - taps // 2) + np.arange(height) * (width + 4)
    # A place outside is filled below, so any pixel will do.
    places = first[:, None] + np.arange(width + taps - 1)
    fetched = torch.from_numpy(np.take(_edged(image).reshape(3, -1), places, axis=1, mode="clip")).float()
    total = fetched[..., :width] * weights[0]
    for tap in range(1, taps):
        total.addcmul_(fetched[..., tap : tap + width], weights[tap])
    out = to_bytes(total)
    nearest = np.floor(shift + 0.5).astype(np.int32)[:, None] + np.arange(width, dtype=np.int32)
    # A negative number is a very large unsigned one.
    outside = nearest.view(np.uint32) >= width
    for plane, value in zip(out, fill, strict=True):
        np.copyto(plane, value, where=outside)
    return out


def slide(image: Pixels, shift: float, cubic: bool, fill: Fill) -> Pixels:
    """The image moved left by `shift` pixels: by slices alone."""
    width = image.shape[2]
    whole, nearest = math.floor(shift), math.floor(shift + 0.5)
    weights = [float(weight) for weight in tap_weights(torch.tensor(shift - whole), 4 if cubic else 2)]
    out = np.empty_like(image)
    out[:] = fill[:, None, None]
    first, last = max(0, -nearest), min(width, width - nearest)
    if first < last:
        start = first + whole + 3 - len(weights) // 2
        taken = torch.from_numpy(_edged(image)).narrow(2, start, last - first + len(weights) - 1).float()
        total = taken[..., : last - first] * weights[0]
        for tap, weight in enumerate(weights[1:], start=1):
            total.add_(taken[..., tap : tap + last - first], alpha=weight)
        out[..., first:last] = to_bytes(total)
    return out


def move(image: Pixels, matrix: Float[np.ndarray, "6"], cubic: bool, fill: Fill) -> Pixels:
    """Rotation, shear or translation, with Pillow's sampling rules.

    Pillow takes the colour at the mapped pixel centre, repeats the edge for the neighbours it needs, and fills where
    the centre itself falls outside. Its bicubic weights have a = -1.
    """
    _, height, width = image.shape
    a, b, c, d, e, f = matrix.tolist()
    # Along columns: along the rows of the image turned over.
    turned = image.swapaxes(1, 2)
    if (a, b, d, e, f) == (1, 0, 0, 1, 0):
        return slide(image, c, cubic, fill)
    if (a, b, c, d, e) == (1, 0, 0, 0, 1):
        return slide(turned, f, cubic, fill).swapaxes(1, 2)
    if (a, d, e, f) == (1, 0, 1, 0):
        return shift_rows(image, b * (np.arange(height) + 0.5) + c, cubic, fill)
    if (a, b, c, e) == (1, 0, 0, 1):
        return shift_rows(turned, d * (np.arange(width) + 0.5) + f, cubic, fill).swapaxes(1, 2)
    resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    pillow, colour = _to_pillow(image), tuple(fill.tolist())
    moved = pillow.transform(
        pillow.size, Image.Transform.AFFINE, (a, b, c, d, e, f), resample, fillcolor=colour
    )
    return _from_pillow(moved)


COLOUR: dict[str, Callable[[Pixels, float], Pixels]] = {
    **POINTWISE,
    "contrast": contrast,
    "auto_contrast": auto_contrast,
    "equalize": equalize,
    "colour": colour,
    "sharpness": sharpness,
    "gaussian_blur": gaussian_blur,
    "hue": hue,
}


def apply_layer(
    images: UInt8[Tensor, "B 3 H W"], layer: Layer, fill: UInt8[Tensor, "3"]
) -> UInt8[Tensor, "B 3 H W"]:
    """Apply each sample's operation, in place where the images are on the CPU; elsewhere they are fetched and sent."""
    if images.device.type != "cpu":
        return apply_layer(images.cpu(), layer, fill.cpu()).to(images.device)
    batch, edge = images.numpy(), fill.numpy()
    for kind, rows in layer.rows.items():
        if kind in PLANE:
            maps = matrices(kind, layer.argument[rows], *batch.shape[2:])
            for row, matrix in zip(rows.tolist(), maps, strict=True):
                batch[row] = move(batch[row], matrix, bool(layer.cubic[row]), edge)
        else:
            for row in rows.tolist():
                batch[row] = COLOUR[kind](batch[row], float(layer.argument[row]))
    return images
