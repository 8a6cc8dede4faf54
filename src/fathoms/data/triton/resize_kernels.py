"""Crop, resize and mirror pictures of words: one kernel sideways, one upright, one where nothing is resized.

The arithmetic is that of `fathoms.data.boxes`, with each picture's own number of taps instead of the largest of
the batch, and weights made where they are used instead of read from tables.
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def box_weight(distance, cubic):
    """Weight of a pixel at a distance in units of the filter: Pillow's bicubic (a = -0.5) or bilinear."""
    x = tl.abs(distance)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    curved = tl.where(x < 1, near, tl.where(x < 2, far, 0.0))
    return tl.where(cubic, curved, tl.maximum(1 - x, 0.0))


@triton.jit
def box_taps(place, length, cubic, flip, SIZE: tl.constexpr):
    """Of places in the result: first tap, number of taps, distance of the first and from tap to tap, in filters.

    The ends are rounded in float64, as Pillow's are; a distance is small, and float32 is enough for it.
    """
    scale = length.to(tl.float64) / SIZE
    shrink = tl.maximum(scale, 1.0)
    reach = tl.where(cubic, 2.0, 1.0) * shrink
    centre = (tl.where(flip, SIZE - 1 - place, place).to(tl.float64) + 0.5) * scale
    first = tl.maximum(tl.floor(centre - reach + 0.5), 0.0)
    last = tl.minimum(tl.floor(centre + reach + 0.5), length.to(tl.float64))
    nearest = ((first - centre + 0.5) / shrink).to(tl.float32)
    return first.to(tl.int64), (last - first).to(tl.int32), nearest, (1 / shrink).to(tl.float32)


@triton.jit
def one_over_sum(taps, nearest, step, cubic):
    """One over what the weights of each place add up to."""
    total = tl.zeros_like(nearest)
    for tap in range(tl.max(taps, 0)):
        total += tl.where(tap < taps, box_weight(nearest + tap * step, cubic), 0.0)
    return 1 / total


@triton.jit
def channel(words, shift: tl.constexpr):
    """One byte of every word, as float32."""
    return ((words >> shift) & 255).to(tl.float32)


@triton.jit
def as_byte(total):
    """Sums rounded to a byte."""
    return tl.minimum(tl.maximum(total + 0.5, 0.0), 255.0).to(tl.int32)


@triton.jit
def columns_kernel(
    pixels, table, columns, count, SIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Rows of a picture that its box touches, resized sideways: (rows of all pictures, SIZE) words."""
    picture = tl.program_id(0)
    own = table + picture
    rows = tl.load(own + 7 * count)
    row = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.program_id(2) * C + tl.arange(0, C)
    if tl.program_id(1) * R < rows:
        offset, pitch, left = tl.load(own), tl.load(own + count), tl.load(own + 3 * count)
        length, width = tl.load(own + 5 * count), tl.load(own + 6 * count)
        low, start = tl.load(own + 8 * count), tl.load(own + 9 * count)
        cubic, flip = tl.load(own + 11 * count) != 0, tl.load(own + 12 * count) != 0
        first, taps, nearest, step = box_taps(tl.minimum(column, SIZE - 1), length, cubic, flip, SIZE)
        share = one_over_sum(taps, nearest, step, cubic)
        base = offset + (low + row)[:, None] * pitch
        none = tl.zeros((R, C), tl.float32)
        red, green, blue = none, none, none
        for tap in range(tl.max(taps, 0)):
            position = left + first + tap
            inside = (tap < taps) & (position >= 0) & (position < width) & (column < SIZE)
            weight = tl.where(inside, box_weight(nearest + tap * step, cubic) * share, 0.0)[None, :]
            words = tl.load(
                pixels + base + position[None, :], (row < rows)[:, None] & inside[None, :], other=0
            )
            red += channel(words, 0) * weight
            green += channel(words, 8) * weight
            blue += channel(words, 16) * weight
        packed = as_byte(red) | (as_byte(green) << 8) | (as_byte(blue) << 16)
        out = columns + (start + row)[:, None] * SIZE + column[None, :]
        tl.store(out, packed, (row < rows)[:, None] & (column < SIZE)[None, :])


@triton.jit
def rows_kernel(
    columns, table, images, count, SIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The pictures (B, 3, SIZE, SIZE), out of the rows that `columns_kernel` made."""
    picture = tl.program_id(0)
    own = table + picture
    row = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.program_id(2) * C + tl.arange(0, C)
    top, length = tl.load(own + 2 * count), tl.load(own + 4 * count)
    low, start, high = tl.load(own + 8 * count), tl.load(own + 9 * count), tl.load(own + 10 * count)
    cubic = tl.load(own + 11 * count) != 0
    first, taps, nearest, step = box_taps(tl.minimum(row, SIZE - 1), length, cubic, False, SIZE)
    share = one_over_sum(taps, nearest, step, cubic)
    none = tl.zeros((R, C), tl.float32)
    red, green, blue = none, none, none
    for tap in range(tl.max(taps, 0)):
        position = top + first + tap
        inside = (tap < taps) & (position >= 0) & (position < high) & (row < SIZE)
        weight = tl.where(inside, box_weight(nearest + tap * step, cubic) * share, 0.0)[:, None]
        place = (start + position - low)[:, None] * SIZE + column[None, :]
        words = tl.load(columns + place, inside[:, None] & (column < SIZE)[None, :], other=0)
        red += channel(words, 0) * weight
        green += channel(words, 8) * weight
        blue += channel(words, 16) * weight
    mask = (row < SIZE)[:, None] & (column < SIZE)[None, :]
    out = images + picture.to(tl.int64) * (3 * SIZE * SIZE) + row[:, None] * SIZE + column[None, :]
    tl.store(out, as_byte(red).to(tl.uint8), mask)
    tl.store(out + SIZE * SIZE, as_byte(green).to(tl.uint8), mask)
    tl.store(out + 2 * SIZE * SIZE, as_byte(blue).to(tl.uint8), mask)


@triton.jit
def copy_kernel(
    pixels, table, images, count, SIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Boxes that already have the wanted size: one fetch, black outside the picture."""
    picture = tl.program_id(0)
    own = table + picture
    row = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.program_id(2) * C + tl.arange(0, C)
    offset, pitch = tl.load(own), tl.load(own + count)
    top, left = tl.load(own + 2 * count), tl.load(own + 3 * count)
    width, high = tl.load(own + 6 * count), tl.load(own + 10 * count)
    flip = tl.load(own + 12 * count) != 0
    y, x = top + row, left + tl.where(flip, SIZE - 1 - column, column)
    mask = (row < SIZE)[:, None] & (column < SIZE)[None, :]
    inside = mask & ((y >= 0) & (y < high))[:, None] & ((x >= 0) & (x < width))[None, :]
    words = tl.load(pixels + offset + y[:, None] * pitch + x[None, :], inside, other=0)
    out = images + picture.to(tl.int64) * (3 * SIZE * SIZE) + row[:, None] * SIZE + column[None, :]
    tl.store(out, (words & 255).to(tl.uint8), mask)
    tl.store(out + SIZE * SIZE, ((words >> 8) & 255).to(tl.uint8), mask)
    tl.store(out + 2 * SIZE * SIZE, ((words >> 16) & 255).to(tl.uint8), mask)
