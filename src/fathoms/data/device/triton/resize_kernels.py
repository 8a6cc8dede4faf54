"""Triton kernels that crop, resize and flip images of words: along rows, along columns, and copy without resizing.

The arithmetic is that of `fathoms.data.device.resize`, with each image's own number of taps instead of the largest of
the batch, and weights computed where they are used instead of read from tables.
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

# Rows of the table of images and their crop boxes.
FIELDS = (
    "offset", "pitch", "top", "left", "box_h", "box_w", "width", "rows", "low", "start", "high", "cubic", "flip",
)  # fmt: skip
OFFSET, PITCH, TOP, LEFT, BOX_H, BOX_W, WIDTH, ROWS, LOW, START, HIGH, CUBIC, FLIP = (
    tl.constexpr(number) for number in range(len(FIELDS))
)


@triton.jit
def field_of(table_ptr, count, field: tl.constexpr):
    """A field of this program's image, from a table of `count` images."""
    return tl.load(table_ptr + field * count + tl.program_id(0))


@triton.jit
def tap_weight(distance, cubic):
    """Weight of a pixel at a distance in units of the filter: Pillow's bicubic (a = -0.5) or bilinear."""
    x = tl.abs(distance)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    curved = tl.where(x < 1, near, tl.where(x < 2, far, 0.0))
    return tl.where(cubic, curved, tl.maximum(1 - x, 0.0))


@triton.jit
def taps_of(place, length, cubic, flip, SIZE: tl.constexpr):
    """First tap, number of taps, distance of the first tap and between taps, in units of the filter, per output place.

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
    """One over the sum of the weights at each place."""
    total = tl.zeros_like(nearest)
    for tap in range(tl.max(taps, 0)):
        total += tl.where(tap < taps, tap_weight(nearest + tap * step, cubic), 0.0)
    return 1 / total


@triton.jit
def channel(words, shift: tl.constexpr):
    """One byte of every word, as float32."""
    return ((words >> shift) & 255).to(tl.float32)


@triton.jit
def as_byte(total):
    """Round a sum to a byte."""
    return tl.minimum(tl.maximum(total + 0.5, 0.0), 255.0).to(tl.int32)


@triton.jit
def store_planes(image_ptr, row, column, red, green, blue, SIZE: tl.constexpr):
    """Store a tile of this program's image, from one tile of whole numbers per channel."""
    here = (row < SIZE)[:, None] & (column < SIZE)[None, :]
    out_ptr = image_ptr + tl.program_id(0).to(tl.int64) * (3 * SIZE * SIZE)
    out_ptr += row[:, None] * SIZE + column[None, :]
    tl.store(out_ptr, red.to(tl.uint8), here)
    tl.store(out_ptr + SIZE * SIZE, green.to(tl.uint8), here)
    tl.store(out_ptr + 2 * SIZE * SIZE, blue.to(tl.uint8), here)


@triton.jit
def columns_kernel(
    pixel_ptr, table_ptr, column_ptr, count, SIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Resize, along the row, the rows of an image that its box touches: (rows of all images, SIZE) words."""
    rows = field_of(table_ptr, count, ROWS)
    row = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.program_id(2) * C + tl.arange(0, C)
    # The grid is made for the tallest box.
    if tl.program_id(1) * R < rows:
        cubic, flip = field_of(table_ptr, count, CUBIC) != 0, field_of(table_ptr, count, FLIP) != 0
        left, width = field_of(table_ptr, count, LEFT), field_of(table_ptr, count, WIDTH)
        first, taps, nearest, step = taps_of(
            tl.minimum(column, SIZE - 1), field_of(table_ptr, count, BOX_W), cubic, flip, SIZE
        )
        share = one_over_sum(taps, nearest, step, cubic)
        line = (field_of(table_ptr, count, LOW) + row) * field_of(table_ptr, count, PITCH)
        line_ptr = pixel_ptr + field_of(table_ptr, count, OFFSET) + line[:, None]
        none = tl.zeros((R, C), tl.float32)
        red, green, blue = none, none, none
        for tap in range(tl.max(taps, 0)):
            position = left + first + tap
            inside = (tap < taps) & (position >= 0) & (position < width) & (column < SIZE)
            weight = tl.where(inside, tap_weight(nearest + tap * step, cubic) * share, 0.0)[None, :]
            words = tl.load(line_ptr + position[None, :], (row < rows)[:, None] & inside[None, :], other=0)
            red += channel(words, 0) * weight
            green += channel(words, 8) * weight
            blue += channel(words, 16) * weight
        packed = as_byte(red) | (as_byte(green) << 8) | (as_byte(blue) << 16)
        place = (field_of(table_ptr, count, START) + row)[:, None] * SIZE + column[None, :]
        tl.store(column_ptr + place, packed, (row < rows)[:, None] & (column < SIZE)[None, :])


@triton.jit
def rows_kernel(
    column_ptr, table_ptr, image_ptr, count, SIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Resize along the columns: the images (B, 3, SIZE, SIZE), from the rows that `columns_kernel` made."""
    row = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.program_id(2) * C + tl.arange(0, C)
    top, high = field_of(table_ptr, count, TOP), field_of(table_ptr, count, HIGH)
    in_list = field_of(table_ptr, count, START) - field_of(table_ptr, count, LOW)
    cubic = field_of(table_ptr, count, CUBIC) != 0
    first, taps, nearest, step = taps_of(
        tl.minimum(row, SIZE - 1), field_of(table_ptr, count, BOX_H), cubic, False, SIZE
    )
    share = one_over_sum(taps, nearest, step, cubic)
    none = tl.zeros((R, C), tl.float32)
    red, green, blue = none, none, none
    for tap in range(tl.max(taps, 0)):
        position = top + first + tap
        inside = (tap < taps) & (position >= 0) & (position < high) & (row < SIZE)
        weight = tl.where(inside, tap_weight(nearest + tap * step, cubic) * share, 0.0)[:, None]
        place = (in_list + position)[:, None] * SIZE + column[None, :]
        words = tl.load(column_ptr + place, inside[:, None] & (column < SIZE)[None, :], other=0)
        red += channel(words, 0) * weight
        green += channel(words, 8) * weight
        blue += channel(words, 16) * weight
    store_planes(image_ptr, row, column, as_byte(red), as_byte(green), as_byte(blue), SIZE)


@triton.jit
def copy_kernel(
    pixel_ptr, table_ptr, image_ptr, count, SIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Copy boxes that already have the wanted size; black outside the image."""
    row = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.program_id(2) * C + tl.arange(0, C)
    flip = field_of(table_ptr, count, FLIP) != 0
    y = field_of(table_ptr, count, TOP) + row
    x = field_of(table_ptr, count, LEFT) + tl.where(flip, SIZE - 1 - column, column)
    rows = (row < SIZE) & (y >= 0) & (y < field_of(table_ptr, count, HIGH))
    columns = (column < SIZE) & (x >= 0) & (x < field_of(table_ptr, count, WIDTH))
    place = field_of(table_ptr, count, OFFSET) + y[:, None] * field_of(table_ptr, count, PITCH) + x[None, :]
    words = tl.load(pixel_ptr + place, rows[:, None] & columns[None, :], other=0)
    store_planes(image_ptr, row, column, words & 255, (words >> 8) & 255, (words >> 16) & 255, SIZE)
