"""The operations on one picture at a time, for a CPU: the pixels of the batched ones, several times as fast.

A CPU gains nothing from batches of this size; it gains from bytes, from tables, and from memory that
stays in its cache. Each step is left to the library that is quickest at it: numpy fetches, torch
computes, Pillow counts, rotates and blurs. All of them let other threads run meanwhile.
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

Picture = UInt8[np.ndarray, "3 H W"]
Fill = UInt8[np.ndarray, "3"]


def to_bytes(values: Float[Tensor, "..."]) -> UInt8[np.ndarray, "..."]:
    """Clip to a byte and drop the fraction, as Pillow's C code does; `values` is used up."""
    # numpy converts float32 to uint8 four times as fast as torch.
    return values.add_(tables.CUT_MARGIN).clamp_(0, 255).numpy().astype(np.uint8)


def look_up(picture: Picture, table: UInt8[np.ndarray, "c 256"]) -> Picture:
    """Replace every value by its entry in the table, the same for all channels or one for each."""
    if len(table) == 1:
        return np.take(table[0], picture)
    return np.stack([np.take(own, plane) for own, plane in zip(table, picture, strict=True)])


def invert(picture: Picture, _: float) -> Picture:
    """255 - v."""
    return ~picture


def posterize(picture: Picture, factor: float) -> Picture:
    """The `factor` highest bits."""
    return picture & np.uint8(0xFF << 8 - min(8, max(0, int(factor))) & 0xFF)


def solarize(picture: Picture, factor: float) -> Picture:
    """Every value from the threshold `factor` up inverted; a bit that is set twice is clear again."""
    return picture ^ ((picture >= factor) * np.uint8(255))


def solarize_add(picture: Picture, factor: float) -> Picture:
    """`factor`, at most 128, added to every value below 128."""
    return picture + (picture < 128) * np.uint8(factor)


def brightness(picture: Picture, factor: float) -> Picture:
    """Scale: factor * v."""
    return np.take(np.clip(np.arange(256) * factor + tables.CUT_MARGIN, 0, 255).astype(np.uint8), picture)


def contrast(picture: Picture, factor: float) -> Picture:
    """A stretch about the mean luma, as `tables.contrast`."""
    total = int(tables.luma(*torch.from_numpy(picture).float()).sum(dtype=torch.float64))
    pixels = picture[0].size
    mean = torch.tensor([(2 * total + pixels) // (2 * pixels)], dtype=torch.float32)
    return look_up(picture, tables.contrast(mean, torch.tensor([factor]))[0].numpy())


def auto_contrast(picture: Picture, _: float) -> Picture:
    """Each channel stretched to 0..255, as `tables.auto_contrast`."""
    planes = picture.reshape(3, -1)
    low, high = torch.from_numpy(planes.min(1))[None], torch.from_numpy(planes.max(1))[None]
    return look_up(picture, tables.auto_contrast(low, high)[0].numpy())


def equalize(picture: Picture, _: float) -> Picture:
    """Values made equally frequent, as `tables.equalize`."""
    count = torch.tensor([[Image.fromarray(plane).histogram() for plane in picture]])
    return look_up(picture, tables.equalize(count)[0].numpy())


def colour(picture: Picture, factor: float) -> Picture:
    """Saturation, as `filters.colour`."""
    pixels = torch.from_numpy(picture).float()
    shades = tables.luma(*pixels)
    return to_bytes(pixels.sub_(shades).mul_(factor).add_(shades))


def sharpness(picture: Picture, factor: float) -> Picture:
    """A blend with a smoothed copy, as `filters.sharpness`."""
    values = torch.from_numpy(picture).to(torch.int16)
    rows = (values[:, :-2] + values[:, 1:-1]).add_(values[:, 2:])
    total = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
    middle = values[:, 1:-1, 1:-1]
    smooth = total.add_(middle, alpha=4).float().add_(6.5).mul_(1 / 13).floor_()
    out = picture.copy()
    out[:, 1:-1, 1:-1] = to_bytes(smooth.lerp_(middle.float(), factor))
    return out


def hue(picture: Picture, factor: float) -> Picture:
    """The hue turned, by the batched operation on a batch of one."""
    return filters.hue(torch.from_numpy(picture)[None], torch.tensor([factor]))[0].numpy()


def _as_image(picture: Picture) -> Image.Image:
    # Pillow joins and parts planes several times as fast as numpy transposes them.
    return Image.merge("RGB", [Image.fromarray(plane) for plane in picture])


def _as_picture(image: Image.Image) -> Picture:
    return np.stack([np.asarray(plane) for plane in image.split()])


def gaussian_blur(picture: Picture, factor: float) -> Picture:
    """Pillow's blur with standard deviation `factor`."""
    return _as_picture(_as_image(picture).filter(ImageFilter.GaussianBlur(factor)))


def _edged(picture: Picture, axis: int) -> UInt8[np.ndarray, "3 h w"]:
    """The picture with its edges repeated twice: all that a centre inside it can ask for."""
    shape = list(picture.shape)
    shape[axis] += 4
    out = np.empty(shape, np.uint8)
    into, of = np.moveaxis(out, axis, 0), np.moveaxis(picture, axis, 0)
    into[2:-2], into[:2], into[-2:] = of, of[:1], of[-1:]
    return out


def shift_rows(picture: Picture, shift: Float[np.ndarray, " H"], cubic: bool, fill: Fill) -> Picture:
    """Row y of the result is row y of the picture moved left by shift[y] pixels.

    The fraction of the shift is the same along a row, so each row is fetched once and its neighbours
    are slices of what was fetched.
    """
    _, height, width = picture.shape
    base = np.floor(shift)
    weights = tap_weights(torch.from_numpy((shift - base).astype(np.float32))[:, None], 4 if cubic else 2)
    taps = len(weights)
    first = base.astype(np.int64) + (3 - taps // 2) + np.arange(height) * (width + 4)
    fetched = _fetch(_edged(picture, 2), first[:, None] + np.arange(width + taps - 1))
    out = fetched[..., :width] * weights[0]
    for tap in range(1, taps):
        out.addcmul_(fetched[..., tap : tap + width], weights[tap])
    nearest = np.floor(shift + 0.5).astype(np.int32)[:, None] + np.arange(width, dtype=np.int32)
    return _filled(to_bytes(out), nearest, width, fill)


def shift_columns(picture: Picture, shift: Float[np.ndarray, " W"], cubic: bool, fill: Fill) -> Picture:
    """Column x of the result is column x of the picture moved up by shift[x] pixels."""
    _, height, width = picture.shape
    base = np.floor(shift)
    weights = tap_weights(torch.from_numpy((shift - base).astype(np.float32)), 4 if cubic else 2)
    taps = len(weights)
    first = (base.astype(np.int64) + (3 - taps // 2)) * width + np.arange(width)
    fetched = _fetch(_edged(picture, 1), first + (np.arange(height + taps - 1) * width)[:, None])
    out = fetched[:, :height] * weights[0]
    for tap in range(1, taps):
        out.addcmul_(fetched[:, tap : tap + height], weights[tap])
    nearest = np.floor(shift + 0.5).astype(np.int32) + np.arange(height, dtype=np.int32)[:, None]
    return _filled(to_bytes(out), nearest, height, fill)


def slide(picture: Picture, shift: float, axis: int, cubic: bool, fill: Fill) -> Picture:
    """The picture moved by `shift` pixels, left for axis 2 and up for axis 1: all slices, nothing fetched."""
    length = picture.shape[axis]
    whole, nearest = math.floor(shift), math.floor(shift + 0.5)
    weights = [float(weight) for weight in tap_weights(torch.tensor(shift - whole), 4 if cubic else 2)]
    out = np.empty_like(picture)
    out[:] = fill[:, None, None]
    first, last = max(0, -nearest), min(length, length - nearest)
    if first < last:
        start = first + whole + 3 - len(weights) // 2
        taken = (
            torch.from_numpy(_edged(picture, axis))
            .narrow(axis, start, last - first + len(weights) - 1)
            .float()
        )
        total = taken.narrow(axis, 0, last - first) * weights[0]
        for tap, weight in enumerate(weights[1:], start=1):
            total.add_(taken.narrow(axis, tap, last - first), alpha=weight)
        where = (slice(None), slice(first, last)) if axis == 1 else (..., slice(first, last))
        out[where] = to_bytes(total)
    return out


def _fetch(padded: UInt8[np.ndarray, "3 h w"], index: np.ndarray) -> Float[Tensor, "3 y x"]:
    """Pixels by their place in a plane. A place outside is one that will be filled: any pixel does."""
    return torch.from_numpy(np.take(padded.reshape(3, -1), index, axis=1, mode="clip")).float()


def _filled(picture: Picture, nearest: np.ndarray, limit: int, fill: Fill) -> Picture:
    """The picture with the fill where the nearest pixel is not in 0..limit-1."""
    # A negative number is a very large unsigned one.
    outside = nearest.view(np.uint32) >= limit
    for plane, value in zip(picture, fill, strict=True):
        np.copyto(plane, value, where=outside)
    return picture


def move(picture: Picture, matrix: Float[np.ndarray, "6"], cubic: bool, fill: Fill) -> Picture:
    """One of the geometric operations, as `geometry.affine`."""
    _, height, width = picture.shape
    a, b, c, d, e, f = matrix.tolist()
    if (a, b, d, e) == (1, 0, 0, 1) and 0 in (c, f):
        return slide(picture, c or f, 2 if c else 1, cubic, fill)
    if (a, d, e, f) == (1, 0, 1, 0):
        return shift_rows(picture, b * (np.arange(height) + 0.5) + c, cubic, fill)
    if (a, b, c, e) == (1, 0, 0, 1):
        return shift_columns(picture, d * (np.arange(width) + 0.5) + f, cubic, fill)
    resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    image, colour = _as_image(picture), tuple(fill.tolist())
    moved = image.transform(
        image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), resample, fillcolor=colour
    )
    return _as_picture(moved)


COLOUR: dict[str, Callable[[Picture, float], Picture]] = {
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
    """The batch with each sample's operation applied; `images` itself is changed and returned."""
    pictures, edge = images.numpy(), fill.numpy()
    for kind, rows in layer.rows.items():
        if kind in PLANE:
            maps = matrices(kind, layer.argument[rows], *pictures.shape[2:])
            for row, matrix in zip(rows.tolist(), maps, strict=True):
                pictures[row] = move(pictures[row], matrix, bool(layer.cubic[row]), edge)
        else:
            for row in rows.tolist():
                pictures[row] = COLOUR[kind](pictures[row], float(layer.argument[row]))
    return images
