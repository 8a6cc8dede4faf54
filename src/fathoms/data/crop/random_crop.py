"""Random crop boxes for training, and the centre crop for evaluation.

Everything here is arithmetic on sizes and random numbers, so the box is known before a pixel is decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fathoms.data.counter_rng import uniforms
from fathoms.errors import ConfigError
from fathoms.names.registry import Registry, check_name

# Random numbers of a key: ten areas, ten aspects, then top, left, flip and filter.
TRIES = 10
FILTERS = ("bilinear", "bicubic")
_FEW = 64

CROPS: Registry[np.ndarray, None] = Registry("crop")


@dataclass(frozen=True)
class CropOptions:
    """Options of training crops; each has the name of its flag."""

    crop: str = "resized"
    """resized: RandomResizedCrop; pad: shift by up to `crop_padding` pixels, black outside; whole: the whole image."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the area, for `resized`."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height, for `resized`."""
    crop_padding: int = 4
    """Pixels on each side, for `pad`."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    train_interpolation: str = "random"
    """bilinear, bicubic, or random: one of the two for each sample."""

    def __post_init__(self) -> None:
        CROPS.check(self.crop, "--crop")
        names = (*FILTERS, "random")
        check_name(self.train_interpolation, names, "interpolation", "--train-interpolation")
        (low, high), (narrow, wide) = self.scale, self.ratio
        if not 0 < low <= high <= 1:
            raise ConfigError(f"--scale {low} {high}: must be two rising shares of the area, in (0, 1]")
        if not 0 < narrow <= wide:
            raise ConfigError(f"--ratio {narrow} {wide}: must be two rising positive numbers")
        if self.crop_padding < 0:
            raise ConfigError(f"--crop-padding {self.crop_padding}: must be at least 0")
        if not 0 <= self.hflip <= 1:
            raise ConfigError(f"--hflip {self.hflip}: must be a probability, from 0 to 1")


class Draws:
    """Uniform random numbers of each key.

    For a few keys all are computed at once, because a call costs more than its arithmetic; for many keys only those
    that are needed.
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
    # Most images take their first try, so the other nine are drawn for the rest alone.
    for begin, count in ((0, TRIES),) if len(sizes) <= _FEW else ((0, 1), (1, TRIES - 1)):
        area = whole[rows, None] * (low + (high - low) * draws(rows, count, begin))
        aspect = np.exp(log_low + (log_high - log_low) * draws(rows, count, TRIES + begin))
        wides, talls = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (wides <= width[rows, None]) & (talls <= height[rows, None]) & (wides >= 1) & (talls >= 1)
        chosen = np.arange(len(rows)), fits.argmax(axis=1)
        crop_h[rows], crop_w[rows] = talls[chosen], wides[chosen]
        rows = rows[~fits[chosen]]
    if len(rows):
        # A very long image fits no draw: take the widest crop the aspect range allows.
        h, w = height[rows], width[rows]
        narrow, wide = w / h < options.ratio[0], w / h > options.ratio[1]
        crop_h[rows] = np.where(narrow, np.maximum(1, np.rint(w / options.ratio[0])), h)
        crop_w[rows] = np.where(wide, np.maximum(1, np.rint(h * options.ratio[1])), w)
    place = draws(slice(None), 2, 2 * TRIES)
    top = np.floor(place[:, 0] * (height - crop_h + 1))
    left = np.floor(place[:, 1] * (width - crop_w + 1))
    # Of a long image the centre is taken.
    top[rows], left[rows] = (height - crop_h)[rows] // 2, (width - crop_w)[rows] // 2
    return np.stack([top, left, crop_h, crop_w], axis=1).astype(np.int64)


@CROPS.add("pad")
def padded_boxes(sizes: np.ndarray, draws: Draws, options: CropOptions) -> np.ndarray:
    """The whole image shifted by up to `crop_padding` pixels, never out of sight; black outside."""
    reach = np.minimum(options.crop_padding, sizes - 1)
    place = np.floor(draws(slice(None), 2, 2 * TRIES) * (2 * reach + 1)) - reach
    return np.concatenate([place.astype(np.int64), sizes], axis=1)


@CROPS.add("whole")
def whole_boxes(sizes: np.ndarray, *_: object) -> np.ndarray:
    """The whole image, squeezed to a square."""
    return np.concatenate([np.zeros_like(sizes), sizes], axis=1)


def draw_boxes(
    sizes: np.ndarray, keys: np.ndarray, options: CropOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Crop boxes (n, 4), whether each is flipped, and whether each is resized with the bicubic filter.

    Args:
        sizes: (n, 2) height and width of each image.
        keys: (n,) counter-based random keys, one for each sample.
        options: how boxes are drawn.

    Returns:
        Top, left, height and width of each box; two boolean arrays.
    """
    draws = Draws(keys)
    boxes = CROPS[options.crop](sizes.astype(np.int64), draws, options)
    flip, cubic = draws(slice(None), 2, 2 * TRIES + 2).T
    if options.train_interpolation == "random":
        return boxes, flip < options.hflip, cubic < 0.5
    return boxes, flip < options.hflip, np.full(len(sizes), options.train_interpolation == "bicubic")


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
