"""Triton kernel for the lookup tables of the pointwise operations: 256 bytes per image and channel.

The arithmetic is that of `fathoms.data.augment.lookup_tables`, step by step: float64 for lines and stretches,
float32 for contrast, integers for luma, its mean and histograms. Launched without fused multiply-adds it gives
the same bytes.
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from fathoms.data.augment import lookup_tables as tables

# Operation codes; those with a table come first.
COPY = tl.constexpr(0)
LINES = tl.constexpr(1)
AUTO_CONTRAST = tl.constexpr(2)
CONTRAST = tl.constexpr(3)
EQUALIZE = tl.constexpr(4)
LINEAR = tl.constexpr(5)
CUBIC = tl.constexpr(6)
COLOUR = tl.constexpr(7)
SHARPNESS = tl.constexpr(8)
HUE = tl.constexpr(9)
BLUR = tl.constexpr(10)

CUT_MARGIN = tl.constexpr(tables.CUT_MARGIN)


@triton.jit
def cut(value):
    """Clip to a byte and drop the fraction, as `tables.cut`."""
    return tl.minimum(tl.maximum(value + CUT_MARGIN, 0.0), 255.0).to(tl.uint8)


@triton.jit
def luma(red, green, blue):
    """Luma as Pillow rounds it, of and in int32."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def line_table(line_ptr):
    """Table of two straight lines, below a threshold and from it on, cut to a byte and masked."""
    ramp = tl.arange(0, 256).to(tl.float64)
    low = ramp * tl.load(line_ptr + 1) + tl.load(line_ptr + 2)
    high = ramp * tl.load(line_ptr + 3) + tl.load(line_ptr + 4)
    value = tl.where(ramp < tl.load(line_ptr), low, high)
    value = tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)
    return (value & tl.load(line_ptr + 5).to(tl.int32)).to(tl.uint8)


@triton.jit
def auto_contrast_table(plane_ptr, pixels, BLOCK: tl.constexpr):
    """A channel stretched from its own darkest and brightest value to 0..255."""
    lowest = tl.full((BLOCK,), 255, tl.int32)
    highest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pixels, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(plane_ptr + at, mask=at < pixels, other=0).to(tl.int32)
        highest = tl.maximum(highest, value)
        lowest = tl.minimum(lowest, tl.where(at < pixels, value, 255))
    dark = tl.min(lowest, 0)
    bright = tl.max(highest, 0)
    ramp = tl.arange(0, 256)
    numbers = ramp.to(tl.float64)
    # Two roundings, as torch divides a number by a tensor.
    scale = 1.0 / tl.maximum(bright - dark, 1).to(tl.float64) * 255.0
    value = tl.minimum(tl.maximum(numbers * scale - dark.to(tl.float64) * scale, 0.0), 255.0)
    return tl.where(bright > dark, value.to(tl.int32), ramp).to(tl.uint8)


@triton.jit
def equalize_table(plane_ptr, pixels, BLOCK: tl.constexpr):
    """The values of a channel spread so that they are equally frequent."""
    count = tl.zeros((256,), tl.int32)
    for start in range(0, pixels, BLOCK):
        at = start + tl.arange(0, BLOCK)
        count += tl.histogram(tl.load(plane_ptr + at, mask=at < pixels, other=0).to(tl.int32), 256)
    ramp = tl.arange(0, 256)
    # Padding was counted as zeros.
    count -= tl.where(ramp == 0, tl.cdiv(pixels, BLOCK) * BLOCK - pixels, 0)
    brightest = tl.max(tl.where(count > 0, ramp, 0), 0)
    step = (pixels - tl.sum(tl.where(ramp == brightest, count, 0), 0)) // 255
    before = tl.cumsum(count, 0) - count
    spread = tl.minimum((before + step // 2) // tl.maximum(step, 1), 255)
    return tl.where(step > 0, spread, ramp).to(tl.uint8)


@triton.jit
def contrast_table(image_ptr, pixels, factor, BLOCK: tl.constexpr):
    """A stretch about the mean luma of the image, a whole number."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pixels, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < pixels
        red = tl.load(image_ptr + at, mask=here, other=0).to(tl.int32)
        green = tl.load(image_ptr + pixels + at, mask=here, other=0).to(tl.int32)
        blue = tl.load(image_ptr + 2 * pixels + at, mask=here, other=0).to(tl.int32)
        # Padding is black, with luma 0.
        total += luma(red, green, blue)
    mean = ((tl.sum(total.to(tl.int64), 0) * 2 + pixels) // (2 * pixels)).to(tl.float32)
    return cut(mean + factor * (tl.arange(0, 256).to(tl.float32) - mean))


@triton.jit
def table_kernel(
    batch_ptr, table_ptr, row_ptr, code_ptr, factor_ptr, line_ptr, pixels, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the table of one channel of one image; the first channel's program writes contrast's for all three."""
    place = tl.program_id(0) // 3
    channel = tl.program_id(0) % 3
    row = tl.load(row_ptr + place)
    code = tl.load(code_ptr + row)
    image_ptr = batch_ptr + row.to(tl.int64) * 3 * pixels
    plane_ptr = image_ptr + channel * pixels
    into = table_ptr + place * 768 + tl.arange(0, 256)
    if code == LINES:
        tl.store(into + channel * 256, line_table(line_ptr + place * 6))
    elif code == AUTO_CONTRAST:
        tl.store(into + channel * 256, auto_contrast_table(plane_ptr, pixels, BLOCK))
    elif code == EQUALIZE:
        tl.store(into + channel * 256, equalize_table(plane_ptr, pixels, BLOCK))
    elif channel == 0:
        table = contrast_table(image_ptr, pixels, tl.load(factor_ptr + row), BLOCK)
        for other in tl.static_range(3):
            tl.store(into + other * 256, table)
