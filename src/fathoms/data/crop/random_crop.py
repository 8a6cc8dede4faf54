"""Which part of a picture is used: random crops for training, the centre for validation.

Everything here is arithmetic on sizes and draws, so the crop is known before a pixel is decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fathoms.data.counter_rng import uniforms
from fathoms.errors import ConfigError
from fathoms.registry import Registry, check_name

# Draws of a key: ten tries of an area, ten of an aspect, then top, left, flip and filter.
TRIES = 10
FILTERS = ("bilinear", "bicubic")
_FEW = 64

CROPS: Registry[np.ndarray, None] = Registry("crop")


@dataclass(frozen=True)
class CropOptions:
    """How a training crop is drawn."""

    mode: str = "resized"
    """resized: RandomResizedCrop; pad: shift by up to `padding` pixels with black; whole: all of it."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the area, for `resized`."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height, for `resized`."""
    padding: int = 4
    """Pixels on each side, for `pad`."""
    flip: float = 0.5
    """Probability of a mirror image."""
    interpolation: str = "random"
    """bilinear, bicubic, or random: one of the two for each sample."""

    def __post_init__(self) -> None:
        CROPS.check(self.mode, "data.crop")
        check_name(self.interpolation, (*FILTERS, "random"), "interpolation", "data.interpolation")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"data.scale={self.scale} must be two rising shares of the area in (0, 1]")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ConfigError(f"data.ratio={self.ratio} must be two rising positive numbers")
        if self.padding < 0 or not 0 <= self.flip <= 1:
            raise ConfigError(f"data.padding={self.padding} and data.flip={self.flip} are out of range")


class Draws:
    """Uniform draws of each key, by number.

    For a few keys all are made at once, because each call costs more than what it computes; for many keys
    only those that are asked for.
    """

    def __init__(self, keys: np.ndarray) -> None:
        self.keys = keys
        self._all = uniforms(keys, 2 * TRIES + 4) if len(keys) <= _FEW else None

    def __call__(self, rows: np.ndarray | slice, count: int, first: int) -> np.ndarray:
        """Draws `first` to `first + count` of the keys in `rows`."""
        if self._all is None:
            return uniforms(self.keys[rows], count, first)
        return self._all[rows, first : first + count]


@CROPS.add("resized")
def resized_boxes(sizes: np.ndarray, draws: Draws, options: CropOptions) -> np.ndarray:
    """RandomResizedCrop: the first of ten (area, aspect) draws that fits, else a centred crop."""
    height, width = sizes.T.astype(float)
    whole = height * width
    crop_h, crop_w = np.empty_like(height), np.empty_like(width)
    low, high = options.scale
    log_low, log_high = math.log(options.ratio[0]), math.log(options.ratio[1])
    rows = np.arange(len(sizes))
    # Most pictures take their first try, so the other nine are drawn for the rest alone.
    for begin, count in ((0, TRIES),) if len(sizes) <= _FEW else ((0, 1), (1, TRIES - 1)):
        area = whole[rows, None] * (low + (high - low) * draws(rows, count, begin))
        aspect = np.exp(log_low + (log_high - log_low) * draws(rows, count, TRIES + begin))
        wides, talls = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (wides <= width[rows, None]) & (talls <= height[rows, None]) & (wides >= 1) & (talls >= 1)
        chosen = np.arange(len(rows)), fits.argmax(axis=1)
        crop_h[rows], crop_w[rows] = talls[chosen], wides[chosen]
        rows = rows[~fits[chosen]]
    if len(rows):
        # A very long picture fits no draw: take the widest crop the aspect range allows.
        h, w = height[rows], width[rows]
        narrow, wide = w / h < options.ratio[0], w / h > options.ratio[1]
        crop_h[rows] = np.where(narrow, np.maximum(1, np.rint(w / options.ratio[0])), h)
        crop_w[rows] = np.where(wide, np.maximum(1, np.rint(h * options.ratio[1])), w)
    place = draws(slice(None), 2, 2 * TRIES)
    top = np.floor(place[:, 0] * (height - crop_h + 1))
    left = np.floor(place[:, 1] * (width - crop_w + 1))
    # It is the middle of the long picture that is taken.
    top[rows], left[rows] = (height - crop_h)[rows] // 2, (width - crop_w)[rows] // 2
    return np.stack([top, left, crop_h, crop_w], axis=1).astype(np.int64)


@CROPS.add("pad")
def padded_boxes(sizes: np.ndarray, draws: Draws, options: CropOptions) -> np.ndarray:
    """The whole picture moved by up to `padding` pixels, never out of sight; what comes in from outside is black."""
    reach = np.minimum(options.padding, sizes - 1)
    place = np.floor(draws(slice(None), 2, 2 * TRIES) * (2 * reach + 1)) - reach
    return np.concatenate([place.astype(np.int64), sizes], axis=1)


@CROPS.add("whole")
def whole_boxes(sizes: np.ndarray, *_: object) -> np.ndarray:
    """The whole picture, squeezed to the square where it is not one."""
    return np.concatenate([np.zeros_like(sizes), sizes], axis=1)


def draw_boxes(
    sizes: np.ndarray, keys: np.ndarray, options: CropOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes (n, 4), whether each is mirrored, and whether each is resized with bicubic weights.

    Args:
        sizes: (n, 2) height and width of each picture.
        keys: (n,) where each picture's draws come from.
        options: how boxes are drawn.

    Returns:
        Top, left, height and width of each box; two arrays of truth values.
    """
    draws = Draws(keys)
    boxes = CROPS[options.mode](sizes.astype(np.int64), draws, options)
    flip, cubic = draws(slice(None), 2, 2 * TRIES + 2).T
    if options.interpolation == "random":
        return boxes, flip < options.flip, cubic < 0.5
    return boxes, flip < options.flip, np.full(len(sizes), options.interpolation == "bicubic")


def part_inside(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The part of each box that lies inside its picture; `boxes` is moved to the coordinates of that part."""
    low = np.maximum(boxes[:, :2], 0)
    inside = np.concatenate([low, np.minimum(boxes[:, :2] + boxes[:, 2:], sizes) - low], axis=1)
    boxes[:, :2] -= low
    return inside


def evaluation_geometry(height: int, width: int, size: int, crop_pct: float) -> tuple[int, int, int, int]:
    """Size after the resize, and the corner of the centre crop: (height, width, top, left).

    The shorter side becomes size / crop_pct, then the middle size x size pixels are kept; the
    rounding is torchvision's, which timm's evaluation uses.
    """
    short = math.floor(size / crop_pct)
    if height <= width:
        new_h, new_w = short, int(short * width / height)
    else:
        new_h, new_w = int(short * height / width), short
    return new_h, new_w, round((new_h - size) / 2.0), round((new_w - size) / 2.0)
