"""Which part of a picture is used: random crops for training, the centre for validation.

Everything here is arithmetic on sizes and draws, so the crop is known before a pixel is decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fathoms.errors import ConfigError
from fathoms.registry import Registry, check_name

# Ten tries of (area, aspect), then top, left, flip and filter.
TRIES = 10
DRAWS = 2 * TRIES + 4
FILTERS = ("bilinear", "bicubic")

CROPS: Registry[np.ndarray] = Registry("crop")


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


@CROPS.add("resized")
def resized_boxes(sizes: np.ndarray, draws: np.ndarray, options: CropOptions) -> np.ndarray:
    """RandomResizedCrop: the first of ten (area, aspect) draws that fits, else a centred crop.

    Args:
        sizes: (n, 2) height and width of each picture.
        draws: (n, DRAWS) uniform numbers.
        options: the ranges of area and aspect.

    Returns:
        (n, 4) top, left, height, width.
    """
    height, width = sizes[:, :1].astype(float), sizes[:, 1:].astype(float)
    low, high = options.scale
    area = height * width * (low + (high - low) * draws[:, :TRIES])
    log_low, log_high = math.log(options.ratio[0]), math.log(options.ratio[1])
    aspect = np.exp(log_low + (log_high - log_low) * draws[:, TRIES : 2 * TRIES])
    widths, heights = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
    fits = (widths <= width) & (heights <= height) & (widths >= 1) & (heights >= 1)
    first = fits.argmax(axis=1)
    row = np.arange(len(sizes))
    crop_h, crop_w = heights[row, first], widths[row, first]
    full_h, full_w = height[:, 0], width[:, 0]
    # A very long picture fits no draw: take the widest crop the aspect range allows, in the middle.
    narrow, wide = full_w / full_h < options.ratio[0], full_w / full_h > options.ratio[1]
    spare_h = np.where(narrow, np.maximum(1, np.round(full_w / options.ratio[0])), full_h)
    spare_w = np.where(wide, np.maximum(1, np.round(full_h * options.ratio[1])), full_w)
    found = fits.any(axis=1)
    crop_h, crop_w = np.where(found, crop_h, spare_h), np.where(found, crop_w, spare_w)
    top, left = draws[:, 2 * TRIES], draws[:, 2 * TRIES + 1]
    top = np.where(found, np.floor(top * (full_h - crop_h + 1)), (full_h - crop_h) // 2)
    left = np.where(found, np.floor(left * (full_w - crop_w + 1)), (full_w - crop_w) // 2)
    return np.stack([top, left, crop_h, crop_w], axis=1).astype(np.int64)


@CROPS.add("pad")
def padded_boxes(sizes: np.ndarray, draws: np.ndarray, options: CropOptions) -> np.ndarray:
    """The whole picture moved by up to `padding` pixels; what comes in from outside is black."""
    reach = 2 * options.padding + 1
    top = np.floor(draws[:, 2 * TRIES] * reach) - options.padding
    left = np.floor(draws[:, 2 * TRIES + 1] * reach) - options.padding
    return np.stack([top, left, sizes[:, 0], sizes[:, 1]], axis=1).astype(np.int64)


@CROPS.add("whole")
def whole_boxes(sizes: np.ndarray, draws: np.ndarray, options: CropOptions) -> np.ndarray:  # noqa: ARG001
    """The whole picture, squeezed to the square where it is not one."""
    zero = np.zeros(len(sizes), np.int64)
    return np.stack([zero, zero, sizes[:, 0], sizes[:, 1]], axis=1).astype(np.int64)


def draw_boxes(
    sizes: np.ndarray, draws: np.ndarray, options: CropOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes (n, 4), whether each is mirrored, and whether each is resized with bicubic weights."""
    boxes = CROPS[options.mode](sizes, draws, options)
    flips = draws[:, 2 * TRIES + 2] < options.flip
    if options.interpolation == "random":
        cubic = draws[:, 2 * TRIES + 3] < 0.5
    else:
        cubic = np.full(len(sizes), options.interpolation == "bicubic")
    return boxes, flips, cubic


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
