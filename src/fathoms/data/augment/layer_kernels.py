"""Triton kernels that apply drawn operations to a batch: lookup tables, then each image's own operation.

A program takes a tile of one image, all three channels, and branches on the image's operation code. The arithmetic is
that of `fathoms.data.augment.per_image`: float64 for stretches, float32 for contrast, integers for luma, its mean and
histograms. Launched without fused multiply-adds. Blurred images are left to `blur_kernel`.
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from fathoms.data.augment import per_image

# Operation codes; those with a table come first.
COPY = tl.constexpr(0)
GIVEN = tl.constexpr(1)
AUTO_CONTRAST = tl.constexpr(2)
CONTRAST = tl.constexpr(3)
EQUALIZE = tl.constexpr(4)
LINEAR = tl.constexpr(5)
CUBIC = tl.constexpr(6)
COLOUR = tl.constexpr(7)
SHARPNESS = tl.constexpr(8)
HUE = tl.constexpr(9)
BLUR = tl.constexpr(10)

CUT_MARGIN = tl.constexpr(per_image.CUT_MARGIN)


@triton.jit
def cut(value):
    """Clip to a byte and drop the fraction, as `per_image.to_bytes`."""
    return tl.minimum(tl.maximum(value + CUT_MARGIN, 0.0), 255.0).to(tl.uint8)


@triton.jit
def luma(red, green, blue):
    """Luma as Pillow rounds it, of and in int32."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


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
    batch_ptr, table_ptr, row_ptr, code_ptr, factor_ptr, given_ptr, pixels, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the table of one channel of one image; the first channel's program writes contrast's for all three."""
    place = tl.program_id(0) // 3
    channel = tl.program_id(0) % 3
    row = tl.load(row_ptr + place)
    code = tl.load(code_ptr + row)
    image_ptr = batch_ptr + row.to(tl.int64) * 3 * pixels
    plane_ptr = image_ptr + channel * pixels
    into = table_ptr + place * 768 + tl.arange(0, 256)
    if code == GIVEN:
        tl.store(into + channel * 256, tl.load(given_ptr + place * 256 + tl.arange(0, 256)))
    elif code == AUTO_CONTRAST:
        tl.store(into + channel * 256, auto_contrast_table(plane_ptr, pixels, BLOCK))
    elif code == EQUALIZE:
        tl.store(into + channel * 256, equalize_table(plane_ptr, pixels, BLOCK))
    elif channel == 0:
        table = contrast_table(image_ptr, pixels, tl.load(factor_ptr + row), BLOCK)
        for other in tl.static_range(3):
            tl.store(into + other * 256, table)


ROUND_MARGIN = tl.constexpr(per_image.ROUND_MARGIN)
# Adding and subtracting it rounds a float32 below 2 ** 22 to a whole number, ties to even.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def pixel_of(image_ptr, pixels, at, here):
    """Red, green and blue as int32."""
    red = tl.load(image_ptr + at, mask=here, other=0).to(tl.int32)
    green = tl.load(image_ptr + pixels + at, mask=here, other=0).to(tl.int32)
    blue = tl.load(image_ptr + 2 * pixels + at, mask=here, other=0).to(tl.int32)
    return red, green, blue


@triton.jit
def store_pixel(out_ptr, pixels, at, here, red, green, blue):
    tl.store(out_ptr + at, red, mask=here)
    tl.store(out_ptr + pixels + at, green, mask=here)
    tl.store(out_ptr + 2 * pixels + at, blue, mask=here)


@triton.jit
def copy(image_ptr, out_ptr, pixels, at, here):
    for channel in tl.static_range(3):
        value = tl.load(image_ptr + channel * pixels + at, mask=here, other=0)
        tl.store(out_ptr + channel * pixels + at, value, mask=here)


@triton.jit
def look_up(image_ptr, out_ptr, table_ptr, pixels, at, here):
    """Every value replaced by its entry in the table of its channel."""
    for channel in tl.static_range(3):
        value = tl.load(image_ptr + channel * pixels + at, mask=here, other=0).to(tl.int32)
        found = tl.load(table_ptr + channel * 256 + value)
        tl.store(out_ptr + channel * pixels + at, found, mask=here)


@triton.jit
def tap_weight(d, TAP: tl.constexpr, TAPS: tl.constexpr):
    """Weight of one neighbour of a point that lies `d` past a pixel centre, as `per_image.tap_weights`."""
    if TAPS == 2:
        weight = d if TAP == 1 else 1 - d
    elif TAP == 0:
        weight = d * (-1 + d * (2 - d))
    elif TAP == 1:
        weight = 1 + d * d * (d - 2)
    elif TAP == 2:
        weight = d * (1 + d * (1 - d))
    else:
        weight = d * d * (d - 1)
    return weight


@triton.jit
def row_weight(d, tap, TAPS: tl.constexpr):
    """`tap_weight` of a tap that is not known at compile time."""
    weight = tl.where(tap == 0, tap_weight(d, 0, TAPS), tap_weight(d, 1, TAPS))
    if TAPS == 4:
        weight = tl.where(tap < 2, weight, tl.where(tap == 2, tap_weight(d, 2, 4), tap_weight(d, 3, 4)))
    return weight


@triton.jit
def affine(image_ptr, out_ptr, matrix_ptr, fill_ptr, H, W, at, here, TAPS: tl.constexpr):
    """The colour at the mapped pixel centre, from 2 x 2 or 4 x 4 neighbours; the fill if that lies outside."""
    pixels = H * W
    right = (at % W).to(tl.float32) + 0.5
    down = (at // W).to(tl.float32) + 0.5
    x = tl.load(matrix_ptr) * right + tl.load(matrix_ptr + 1) * down + tl.load(matrix_ptr + 2)
    y = tl.load(matrix_ptr + 3) * right + tl.load(matrix_ptr + 4) * down + tl.load(matrix_ptr + 5)
    inside = (x >= 0) & (x < W) & (y >= 0) & (y < H)
    x -= 0.5
    y -= 0.5
    left = tl.floor(x)
    top = tl.floor(y)
    x -= left
    y -= top
    # Pixels that will be filled are not loaded.
    fetched = here & inside
    red = tl.zeros(at.shape, tl.float32)
    green = tl.zeros(at.shape, tl.float32)
    blue = tl.zeros(at.shape, tl.float32)
    # One row of neighbours at a time: all of them would not fit in the registers.
    for j in range(TAPS):
        line = tl.minimum(tl.maximum(top.to(tl.int32) + (j + 1 - TAPS // 2), 0), H - 1) * W
        along = row_weight(y, j, TAPS)
        for i in tl.static_range(TAPS):
            near = line + tl.minimum(tl.maximum(left.to(tl.int32) + (i + 1 - TAPS // 2), 0), W - 1)
            weight = along * tap_weight(x, i, TAPS)
            r, g, b = pixel_of(image_ptr, pixels, near, fetched)
            red += r.to(tl.float32) * weight
            green += g.to(tl.float32) * weight
            blue += b.to(tl.float32) * weight
    red = tl.where(inside, cut(red), tl.load(fill_ptr))
    green = tl.where(inside, cut(green), tl.load(fill_ptr + 1))
    blue = tl.where(inside, cut(blue), tl.load(fill_ptr + 2))
    store_pixel(out_ptr, pixels, at, here, red, green, blue)


@triton.jit
def colour(image_ptr, out_ptr, factor, pixels, at, here):
    """Saturation: g + factor * (v - g), with g the luma of the pixel."""
    red, green, blue = pixel_of(image_ptr, pixels, at, here)
    shade = luma(red, green, blue)
    grey = shade.to(tl.float32)
    red = cut((red - shade).to(tl.float32) * factor + grey)
    green = cut((green - shade).to(tl.float32) * factor + grey)
    blue = cut((blue - shade).to(tl.float32) * factor + grey)
    store_pixel(out_ptr, pixels, at, here, red, green, blue)


@triton.jit
def sharpness(image_ptr, out_ptr, factor, H, W, at, here):
    """A blend with a smoothing of 3 x 3 pixels, 1 everywhere and 5 in the middle, over 13; the outermost stay."""
    x = at % W
    y = at // W
    inner = here & (x > 0) & (x < W - 1) & (y > 0) & (y < H - 1)
    for channel in tl.static_range(3):
        plane_ptr = image_ptr + channel * H * W
        own = tl.load(plane_ptr + at, mask=here, other=0)
        middle = own.to(tl.int32)
        total = 4 * middle
        for j in tl.static_range(-1, 2):
            for i in tl.static_range(-1, 2):
                total += tl.load(plane_ptr + at + j * W + i, mask=inner, other=0).to(tl.int32)
        # The nearest whole number; a half cannot occur.
        smooth = (2 * total + 13) // 26
        value = cut(smooth.to(tl.float32) + factor * (middle - smooth).to(tl.float32))
        tl.store(out_ptr + channel * H * W + at, tl.where(inner, value, own), mask=here)


@triton.jit
def whole(value):
    """The nearest whole number, as torch rounds."""
    return value + ROUNDER - ROUNDER


@triton.jit
def six(which, high, falling, down, rising):
    """Value of a channel in each sixth of the circle."""
    low = tl.where(which < 2, tl.where(which == 0, high, falling), down)
    return cut(tl.where(which < 4, low, tl.where(which == 4, rising, high)))


@triton.jit
def hue(image_ptr, out_ptr, factor, pixels, at, here):
    """Rotate the hue by `factor` of a full circle; hue and saturation are rounded to bytes, as in Pillow."""
    red, green, blue = pixel_of(image_ptr, pixels, at, here)
    red = red.to(tl.float32)
    green = green.to(tl.float32)
    blue = blue.to(tl.float32)
    high = tl.maximum(tl.maximum(red, green), blue)
    span = high - tl.minimum(tl.minimum(red, green), blue)
    safe = tl.maximum(span, 1.0)
    to_red = tl.div_rn(high - red, safe)
    to_green = tl.div_rn(high - green, safe)
    to_blue = tl.div_rn(high - blue, safe)
    angle = tl.where(green == high, 2 + to_red - to_blue, 4 + to_green - to_red)
    angle = tl.where(red == high, to_blue - to_green, angle)
    turns = tl.div_rn(angle, tl.full(at.shape, 6.0, tl.float32)) + 1
    turns = tl.where(span > 0, turns - tl.floor(turns), 0.0)
    byte = tl.floor(turns * 255 + ROUND_MARGIN) + (factor * 255).to(tl.int32).to(tl.float32)
    byte -= tl.floor(byte * 0.00390625) * 256
    share = tl.floor(tl.div_rn(span * 255, tl.maximum(high, 1.0)) + ROUND_MARGIN)
    share = tl.div_rn(tl.where(high > 0, share, 0.0), tl.full(at.shape, 255.0, tl.float32))
    sector = byte * (6 / 255)
    index = tl.floor(sector)
    fraction = sector - index
    down = whole(high * (1 - share))
    falling = whole(high * (1 - share * fraction))
    rising = whole(high * (1 - share * (1 - fraction)))
    which = index.to(tl.int32) % 6
    # Around the circle each channel takes the same six values, two sectors apart.
    r = six(which, high, falling, down, rising)
    g = six((which + 4) % 6, high, falling, down, rising)
    b = six((which + 2) % 6, high, falling, down, rising)
    store_pixel(out_ptr, pixels, at, here, r, g, b)


@triton.jit
def layer_kernel(
    image_ptr, out_ptr, code_ptr, slot_ptr, factor_ptr, matrix_ptr, table_ptr, fill_ptr, H, W,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Apply an image's operation to one of its tiles."""
    pixels = H * W
    tiles = tl.cdiv(pixels, BLOCK)
    row = tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * BLOCK
    first = row.to(tl.int64) * 3 * pixels
    image_ptr += first
    out_ptr += first
    code = tl.load(code_ptr + row)
    slot = tl.load(slot_ptr + row)
    factor = tl.load(factor_ptr + row)
    if code <= EQUALIZE:
        at = start + tl.arange(0, BLOCK)
        if code == COPY:
            copy(image_ptr, out_ptr, pixels, at, at < pixels)
        else:
            look_up(image_ptr, out_ptr, table_ptr + slot * 768, pixels, at, at < pixels)
    elif code < BLUR:
        # These need many registers per pixel, so the tile is processed in parts.
        for done in range(0, BLOCK, PART):
            at = start + done + tl.arange(0, PART)
            here = at < pixels
            if code == LINEAR:
                affine(image_ptr, out_ptr, matrix_ptr + slot * 6, fill_ptr, H, W, at, here, 2)
            elif code == CUBIC:
                affine(image_ptr, out_ptr, matrix_ptr + slot * 6, fill_ptr, H, W, at, here, 4)
            elif code == COLOUR:
                colour(image_ptr, out_ptr, factor, pixels, at, here)
            elif code == SHARPNESS:
                sharpness(image_ptr, out_ptr, factor, H, W, at, here)
            else:
                hue(image_ptr, out_ptr, factor, pixels, at, here)
