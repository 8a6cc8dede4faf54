"""Pointwise colour operations as lookup tables: out = table[image, channel][value], 256 entries each.

Eight of RandAugment's operations map each value of a channel to another, so one small table per image and
channel and one lookup per pixel serve them all, with Pillow's integers. Five tables depend on the factor alone
and are two straight lines each; the other three need a statistic of the image. The fastest way to that statistic
depends on the device; the table does not.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from fathoms.names.registry import Registry

Images = UInt8[Tensor, "B 3 H W"]
Factors = Float[np.ndarray, " B"]
Lines = Float[np.ndarray, "6 B"]
Number = int | float | np.ndarray

FACTOR_LINES: Registry[np.ndarray, None] = Registry("table operation")
IMAGE_TABLES = ("auto_contrast", "contrast", "equalize")

# Added before a fraction is cut off: a product or a sum of up to sixteen taps that should be whole may come out just
# below it in float32, where Pillow computes in float64.
CUT_MARGIN = 1e-3


def luma(red: Tensor, green: Tensor, blue: Tensor) -> Tensor:
    """Luma as Pillow rounds it, whole numbers in float32. All sums stay below 2 ** 24, hence are exact."""
    total = (red * 19595.0).add_(green, alpha=38470).add_(blue, alpha=7471).add_(0x8000)
    return total.mul_(2.0**-16).floor_()


def cut(values: Tensor) -> Tensor:
    """Clip to a byte and drop the fraction, as Pillow's C code does; `values` is overwritten."""
    return values.add_(CUT_MARGIN).clamp_(0, 255).to(torch.uint8)


@FACTOR_LINES.add("invert")
def invert(factor: Factors) -> Lines:
    """255 - v."""
    return _lines(factor, threshold=0, high=(-1, 255))


@FACTOR_LINES.add("posterize")
def posterize(factor: Factors) -> Lines:
    """Keep the `factor` highest bits; none at 0, which newer Pillow refuses and older Pillow made black."""
    return _lines(factor, mask=0xFF << 8 - np.clip(factor.astype(np.int64), 0, 8) & 0xFF)


@FACTOR_LINES.add("solarize")
def solarize(factor: Factors) -> Lines:
    """Invert every value from the threshold `factor` up."""
    return _lines(factor, threshold=factor, high=(-1, 255))


@FACTOR_LINES.add("solarize_add")
def solarize_add(factor: Factors) -> Lines:
    """Add `factor` to every value below 128."""
    return _lines(factor, threshold=128, low=(1, factor))


@FACTOR_LINES.add("brightness")
def brightness(factor: Factors) -> Lines:
    """Scale: factor * v."""
    return _lines(factor, low=(factor, CUT_MARGIN))


def _lines(
    factor: Factors,
    threshold: Number = 256,
    low: tuple[Number, Number] = (1, 0),
    high: tuple[Number, Number] = (1, 0),
    mask: Number = 255,
) -> Lines:
    out = np.empty((6, len(factor)))
    for row, value in zip(out, (threshold, *low, *high, mask), strict=True):
        row[:] = value
    return out


def line_tables(lines: Float[Tensor, "6 B"]) -> UInt8[Tensor, "B 1 256"]:
    """Tables of two straight lines, below a threshold and from it on, cut to a byte and masked."""
    threshold, slope, shift, high_slope, high_shift, mask = lines[:, :, None, None]
    ramp = torch.arange(256, device=lines.device, dtype=lines.dtype)
    value = torch.where(ramp < threshold, ramp * slope + shift, ramp * high_slope + high_shift)
    return value.clamp_(0, 255).to(torch.uint8).bitwise_and_(mask.to(torch.uint8))


def contrast(mean: Float[Tensor, " B"], factor: Float[Tensor, " B"]) -> UInt8[Tensor, "B 1 256"]:
    """Stretch about the mean luma m, a whole number: m + factor * (v - m)."""
    middle = mean[:, None, None]
    ramp = torch.arange(256, device=mean.device)
    return cut(middle + factor[:, None, None] * (ramp - middle))


def auto_contrast(low: UInt8[Tensor, "B 3"], high: UInt8[Tensor, "B 3"]) -> UInt8[Tensor, "B 3 256"]:
    """Stretch each channel from its own darkest and brightest value to 0..255."""
    ramp = torch.arange(256, device=low.device)
    dark, bright = low[..., None].double(), high[..., None].double()
    scale = 255.0 / (bright - dark).clamp(min=1)
    stretched = (ramp * scale - dark * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(bright > dark, stretched, ramp.to(torch.uint8))


def equalize(count: Int64[Tensor, "B 3 256"]) -> UInt8[Tensor, "B 3 256"]:
    """Spread the values of each channel so that they are equally frequent, given how often each occurs."""
    ramp = torch.arange(256, device=count.device)
    # Pillow divides all pixels but those of the brightest value that occurs into 255 steps.
    brightest = torch.where(count > 0, ramp, 0).amax(2, keepdim=True)
    step = (count.sum(2, keepdim=True) - count.gather(2, brightest)) // 255
    before = count.cumsum(2) - count
    spread = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, spread, ramp).to(torch.uint8)


def image_table(kind: str, images: Images, factor: Float[Tensor, " B"]) -> UInt8[Tensor, "B c 256"]:
    """Table of an operation that needs a statistic of the image, computed by torch."""
    if kind == "auto_contrast":
        return auto_contrast(images.amin((2, 3)), images.amax((2, 3)))
    if kind == "contrast":
        shades = luma(*images.unbind(1))
        pixels = shades.shape[1] * shades.shape[2]
        # Integer arithmetic: the sum of 224 x 224 bytes is too large for float32 to hold exactly.
        mean = (shades.sum((1, 2), dtype=torch.int64) * 2 + pixels) // (2 * pixels)
        return contrast(mean.float(), factor)
    values = images.flatten(2).long()
    one = torch.ones((), dtype=torch.int64, device=images.device).expand(values.shape)
    # bincount needs a host-device sync; scatter_add_ does not.
    count = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=images.device)
    return equalize(count.scatter_add_(2, values, one))


def look_up(images: Images, tables: UInt8[Tensor, "B 3 256"]) -> Images:
    """Replace every value by its entry in the table of its image and channel."""
    first = torch.arange(0, tables.numel(), 256, device=images.device, dtype=torch.int32)
    index = first.view(-1, 3, 1, 1) + images
    return tables.view(-1).index_select(0, index.flatten()).view(images.shape)
