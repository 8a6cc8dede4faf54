"""Pointwise colour operations as tables: out = table[image, channel][value], 256 entries each.

Eight of RandAugment's operations map each value of a channel to another, so building one small table
per picture and channel and looking every pixel up once serves them all, with the integers Pillow gives.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fathoms.registry import Registry

Images = UInt8[Tensor, "B 3 H W"]
Factor = Float[Tensor, " B"]
Table = UInt8[Tensor, "B c 256"]

TABLES: Registry[Tensor] = Registry("table operation")

# A product that should be whole may come out a hair below it in float32; Pillow cuts off in float64.
_HAIR = 1e-3


def grey(images: Images) -> Tensor:
    """Luma as Pillow rounds it, uint8 values in int32, (B, H, W)."""
    red, green, blue = images.to(torch.int32).unbind(1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def cut(values: Tensor) -> Tensor:
    """Clip to a byte and drop the fraction, as Pillow's C code does."""
    # By way of int16: torch converts float32 to uint8 at less than half that speed on a CPU.
    return (values + _HAIR).clamp_(0, 255).to(torch.int16).to(torch.uint8)


def _ramp(device: torch.device) -> Tensor:
    return torch.arange(256, device=device)


@TABLES.add("invert")
def invert(images: Images, factor: Factor) -> Table:
    """255 - v."""
    return (255 - _ramp(images.device)).to(torch.uint8).expand(len(factor), 1, 256)


@TABLES.add("posterize")
def posterize(images: Images, factor: Factor) -> Table:
    """Keep the `factor` highest bits; none at 0, which newer Pillow refuses and older made black."""
    keep = 8 - factor.to(torch.int64).clamp(0, 8)[:, None, None]
    return ((_ramp(images.device) >> keep) << keep).to(torch.uint8)


@TABLES.add("solarize")
def solarize(images: Images, factor: Factor) -> Table:
    """Invert every value from the threshold `factor` up."""
    ramp = _ramp(images.device)
    return torch.where(ramp < factor[:, None, None], ramp, 255 - ramp).to(torch.uint8)


@TABLES.add("solarize_add")
def solarize_add(images: Images, factor: Factor) -> Table:
    """Add `factor` to every value below 128."""
    ramp = _ramp(images.device)
    return torch.where(ramp < 128, ramp + factor[:, None, None], ramp).clamp(max=255).to(torch.uint8)


@TABLES.add("brightness")
def brightness(images: Images, factor: Factor) -> Table:
    """Scale: factor * v."""
    return cut(_ramp(images.device) * factor[:, None, None])


@TABLES.add("contrast")
def contrast(images: Images, factor: Factor) -> Table:
    """Stretch about the mean: m + factor * (v - m), with m the mean luma rounded to a whole number."""
    shades = grey(images)
    pixels = shades.shape[1] * shades.shape[2]
    # Integer arithmetic: the sum of 224 x 224 bytes is too large for float32 to hold exactly.
    mean = (shades.sum((1, 2), dtype=torch.int64) * 2 + pixels) // (2 * pixels)
    mean = mean.float()[:, None, None]
    return cut(mean + factor[:, None, None] * (_ramp(images.device) - mean))


@TABLES.add("auto_contrast")
def auto_contrast(images: Images, factor: Factor) -> Table:  # noqa: ARG001
    """Stretch each channel from its own darkest and brightest value to 0..255."""
    low, high = images.amin((2, 3)).double()[..., None], images.amax((2, 3)).double()[..., None]
    ramp = _ramp(images.device).double()
    scale = 255.0 / (high - low).clamp(min=1)
    stretched = (ramp * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, ramp.to(torch.uint8))


def _histogram(images: Images) -> Tensor:
    """How often each value occurs, (B, 3, 256)."""
    batch, channels = images.shape[:2]
    values = images.flatten(2).long()
    if images.device.type == "cpu":
        start = torch.arange(batch * channels).view(batch, channels, 1) * 256
        return torch.bincount((values + start).flatten(), minlength=batch * channels * 256).view(
            batch, channels, 256
        )
    # bincount would make the host wait for the device; scatter_add_ does not.
    one = torch.ones((), dtype=torch.int64, device=images.device).expand(values.shape)
    return torch.zeros(batch, channels, 256, dtype=torch.int64, device=images.device).scatter_add_(
        2, values, one
    )


@TABLES.add("equalize")
def equalize(images: Images, factor: Factor) -> Table:  # noqa: ARG001
    """Spread the values of each channel so that they are equally frequent."""
    count = _histogram(images)
    # Pillow divides all pixels but those of the brightest value that occurs into 255 steps.
    brightest = images.amax((2, 3)).long()[..., None]
    step = (count.sum(2, keepdim=True) - count.gather(2, brightest)) // 255
    before = count.cumsum(2) - count
    ramp = _ramp(images.device).to(torch.uint8)
    spread = ((before + step // 2) // step.clamp(min=1)).clamp(max=255).to(torch.uint8)
    return torch.where(step > 0, spread, ramp)


def look_up(images: Images, tables: UInt8[Tensor, "B 3 256"]) -> Images:
    """Replace every value by its entry in the table of its picture and channel."""
    return tables.gather(2, images.flatten(2).long()).view(images.shape)
