"""The operations on one image at a time, for a CPU: the pixels of `batched`, several times as fast.

A CPU gains nothing from batches of this size; it gains from bytes, from tables, and from memory that
stays in its cache. Each part uses the library that is fastest at it: numpy gathers, torch computes, Pillow
counts, rotates and blurs. All of them release Python's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageFilter
from torch import Tensor

from fathoms.data.augment import filters
from fathoms.data.augment import lookup_tables as tables
from fathoms.data.augment.geometry import PLANE, matrices, tap_weights
from fathoms.data.augment.policy import Layer

Pixels = UInt8[np.ndarray, "3 H W"]
Fill = UInt8[np.ndarray, "3"]


def to_bytes(values: Float[Tensor, "..."]) -> UInt8[np.ndarray, "..."]:
    """Clip to a byte and drop the fraction, as Pillow's C code does; `values` is overwritten."""
    # numpy converts float32 to uint8 four times as fast as torch.
    return values.add_(tables.CUT_MARGIN).clamp_(0, 255).numpy().astype(np.uint8)


def look_up(image: Pixels, table: UInt8[np.ndarray, "c 256"]) -> Pixels:
    """Replace every value by its entry in the table, the same for all channels or one for each."""
    if len(table) == 1:
        return np.take(table[0], image)
    return np.stack([np.take(own, plane) for own, plane in zip(table, image, strict=True)])


def invert(image: Pixels, _: float) -> Pixels:
    """255 - v."""
    return ~image


def posterize(image: Pixels, factor: float) -> Pixels:
    """The `factor` highest bits."""
    return image & np.uint8(0xFF << 8 - min(8, max(0, int(factor))) & 0xFF)


def solarize(image: Pixels, factor: float) -> Pixels:
    """Every value from the threshold `factor` up inverted; a bit that is set twice is clear again."""
    return image ^ ((image >= factor) * np.uint8(255))


def solarize_add(image: Pixels, factor: float) -> Pixels:
    """`factor`, at most 128, added to every value below 128."""
    return image + (image < 128) * np.uint8(factor)


def brightness(image: Pixels, factor: float) -> Pixels:
    """Scale: factor * v."""
    return np.take(np.clip(np.arange(256) * factor + tables.CUT_MARGIN, 0, 255).astype(np.uint8), image)


def contrast(image: Pixels, factor: float) -> Pixels:
    """A stretch about the mean luma, as `tables.contrast`."""
    total = int(tables.luma(*torch.from_numpy(image).float()).sum(dtype=torch.float64))
    pixels = image[0].size
    mean = torch.tensor([(2 * total + pixels) // (2 * pixels)], dtype=torch.float32)
    return look_up(image, tables.contrast(mean, torch.tensor([factor]))[0].numpy())


def auto_contrast(image: Pixels, _: float) -> Pixels:
    """Each channel stretched to 0..255, as `tables.auto_contrast`."""
    planes = image.reshape(3, -1)
    low, high = torch.from_numpy(planes.min(1))[None], torch.from_numpy(planes.max(1))[None]
    return look_up(image, tables.auto_contrast(low, high)[0].numpy())


def equalize(image: Pixels, _: float) -> Pixels:
    """Values made equally frequent, as `tables.equalize`."""
    count = torch.tensor([[Image.fromarray(plane).histogram() for plane in image]])
    return look_up(image, tables.equalize(count)[0].numpy())


def colour(image: Pixels, factor: float) -> Pixels:
    """Saturation, as `filters.colour`."""
    pixels = torch.from_numpy(image).float()
    shades = tables.luma(*pixels)
    return to_bytes(pixels.sub_(shades).mul_(factor).add_(shades))


def sharpness(image: Pixels, factor: float) -> Pixels:
    """A blend with a smoothed copy, as `filters.sharpness`."""
    values = torch.from_numpy(image).to(torch.int16)
    rows = (values[:, :-2] + values[:, 1:-1]).add_(values[:, 2:])
    total = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
    middle = values[:, 1:-1, 1:-1]
    smooth = total.add_(middle, alpha=4).float().add_(6.5).mul_(1 / 13).floor_()
    out = image.copy()
    out[:, 1:-1, 1:-1] = to_bytes(smooth.lerp_(middle.float(), factor))
    return out


def hue(image: Pixels, factor: float) -> Pixels:
    """Rotate the hue, by the batched operation on a batch of one."""
    return filters.hue(torch.from_numpy(image)[None], torch.tensor([factor]))[0].numpy()


def _to_pillow(image: Pixels) -> Image.Image:
    # Pillow merges and splits planes several times as fast as numpy transposes them.
    return Image.merge("RGB", [Image.fromarray(plane) for plane in image])


def _from_pillow(pillow: Image.Image) -> Pixels:
    return np.stack([np.asarray(plane) for plane in pillow.split()])


def gaussian_blur(image: Pixels, factor: float) -> Pixels:
    """Pillow's blur with standard deviation `factor`."""
    return _from_pillow(_to_pillow(image).filter(ImageFilter.GaussianBlur(factor)))


def _edged(image: Pixels, axis: int) -> UInt8[np.ndarray, "3 h w"]:
    """The image with its edges repeated twice: every neighbour that a point inside it can have."""
    shape = list(image.shape)
    shape[axis] += 4
    out = np.empty(shape, np.uint8)
    into, of = np.moveaxis(out, axis, 0), np.moveaxis(image, axis, 0)
    into[2:-2], into[:2], into[-2:] = of, of[:1], of[-1:]
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
    fetched = _fetch(_edged(image, 2), first[:, None] + np.arange(width + taps - 1))
    out = fetched[..., :width] * weights[0]
    for tap in range(1, taps):
        out.addcmul_(fetched[..., tap : tap + width], weights[tap])
    nearest = np.floor(shift + 0.5).astype(np.int32)[:, None] + np.arange(width, dtype=np.int32)
    return _filled(to_bytes(out), nearest, width, fill)


def shift_columns(image: Pixels, shift: Float[np.ndarray, " W"], cubic: bool, fill: Fill) -> Pixels:
    """Column x of the result is column x of the image moved up by shift[x] pixels."""
    _, height, width = image.shape
    base = np.floor(shift)
    weights = tap_weights(torch.from_numpy((shift - base).astype(np.float32)), 4 if cubic else 2)
    taps = len(weights)
    first = (base.astype(np.int64) + (3 - taps // 2)) * width + np.arange(width)
    fetched = _fetch(_edged(image, 1), first + (np.arange(height + taps - 1) * width)[:, None])
    out = fetched[:, :height] * weights[0]
    for tap in range(1, taps):
        out.addcmul_(fetched[:, tap : tap + height], weights[tap])
    nearest = np.floor(shift + 0.5).astype(np.int32) + np.arange(height, dtype=np.int32)[:, None]
    return _filled(to_bytes(out), nearest, height, fill)


def slide(image: Pixels, shift: float, axis: int, cubic: bool, fill: Fill) -> Pixels:
    """The image moved by `shift` pixels, left for axis 2 and up for axis 1: by slices alone."""
    length = image.shape[axis]
    whole, nearest = math.floor(shift), math.floor(shift + 0.5)
    weights = [float(weight) for weight in tap_weights(torch.tensor(shift - whole), 4 if cubic else 2)]
    out = np.empty_like(image)
    out[:] = fill[:, None, None]
    first, last = max(0, -nearest), min(length, length - nearest)
    if first < last:
        start = first + whole + 3 - len(weights) // 2
        taken = (
            torch.from_numpy(_edged(image, axis)).narrow(axis, start, last - first + len(weights) - 1).float()
        )
        total = taken.narrow(axis, 0, last - first) * weights[0]
        for tap, weight in enumerate(weights[1:], start=1):
            total.add_(taken.narrow(axis, tap, last - first), alpha=weight)
        where = (slice(None), slice(first, last)) if axis == 1 else (..., slice(first, last))
        out[where] = to_bytes(total)
    return out


def _fetch(padded: UInt8[np.ndarray, "3 h w"], index: np.ndarray) -> Float[Tensor, "3 y x"]:
    """Gather pixels by their place in a plane; a place outside is filled later, so any pixel will do."""
    return torch.from_numpy(np.take(padded.reshape(3, -1), index, axis=1, mode="clip")).float()


def _filled(image: Pixels, nearest: np.ndarray, limit: int, fill: Fill) -> Pixels:
    """The image with the fill where the nearest pixel is not in 0..limit-1."""
    # A negative number is a very large unsigned one.
    outside = nearest.view(np.uint32) >= limit
    for plane, value in zip(image, fill, strict=True):
        np.copyto(plane, value, where=outside)
    return image


def move(image: Pixels, matrix: Float[np.ndarray, "6"], cubic: bool, fill: Fill) -> Pixels:
    """One of the geometric operations, as `geometry.affine`."""
    _, height, width = image.shape
    a, b, c, d, e, f = matrix.tolist()
    if (a, b, d, e) == (1, 0, 0, 1) and 0 in (c, f):
        return slide(image, c or f, 2 if c else 1, cubic, fill)
    if (a, d, e, f) == (1, 0, 1, 0):
        return shift_rows(image, b * (np.arange(height) + 0.5) + c, cubic, fill)
    if (a, b, c, e) == (1, 0, 0, 1):
        return shift_columns(image, d * (np.arange(width) + 0.5) + f, cubic, fill)
    resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    pillow, colour = _to_pillow(image), tuple(fill.tolist())
    moved = pillow.transform(
        pillow.size, Image.Transform.AFFINE, (a, b, c, d, e, f), resample, fillcolor=colour
    )
    return _from_pillow(moved)


COLOUR: dict[str, Callable[[Pixels, float], Pixels]] = {
    "invert": invert,
    "posterize": posterize,
    "solarize": solarize,
    "solarize_add": solarize_add,
    "brightness": brightness,
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
    """Apply each sample's operation, in place; returns `images`."""
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
