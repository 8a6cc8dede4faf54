"""Triton kernels that crop and resize, that blur, and that do the last pass: normalise, erase and mix.

Resizing is that of `fathoms.data.images.pixels`, along rows and then along columns, with the own number of taps of
each image instead of the largest of the batch, and weights computed where they are used. A blur is three box blurs
along the rows and three along the columns, rounded after each. One program blurs one plane, alternating between its
place in the result and its share of a scratch buffer. That takes a barrier between two passes, where separate launches
would each cost host time.
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from fathoms.data.augment import per_image

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


ROUND_MARGIN = tl.constexpr(per_image.ROUND_MARGIN)
# Pixels on either side that the box of a blur can reach.
REACH = tl.constexpr(3)
# A byte times this is a word of four such bytes.
FOUR_TIMES = tl.constexpr(0x01010101)


@triton.jit
def weighted(value, box, TAP: tl.constexpr):
    """A tap times its weight; a box is symmetric, so only one half of the weights is kept."""
    return value.to(tl.float32) * box[TAP if TAP <= REACH else 2 * REACH - TAP]


@triton.jit
def rounded(total):
    """Round to a byte, in int32. The weights add up to one, so nothing needs clipping."""
    return tl.floor(total + 0.5 + ROUND_MARGIN).to(tl.int32)


@triton.jit
def byte_pass(given_ptr, into_ptr, box, pixels, step, length, BLOCK: tl.constexpr):
    """A box along pixels that lie `step` apart, `length` to a line."""
    for start in range(0, pixels, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < pixels
        place = at // step % length
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(2 * REACH + 1):
            near = tl.minimum(tl.maximum(place + (tap - REACH), 0), length - 1)
            value = tl.load(given_ptr + at + (near - place) * step, mask=here, other=0)
            total += weighted(value, box, tap)
        tl.store(into_ptr + at, rounded(total).to(tl.uint8), mask=here)
    # The next pass reads what other threads have written.
    tl.debug_barrier()


@triton.jit
def byte_of(before, this, after, NUMBER: tl.constexpr):
    """One of the twelve bytes of three words."""
    word = before if NUMBER < 4 else (this if NUMBER < 8 else after)
    return (word >> (8 * (NUMBER % 4))) & 255


@triton.jit
def row_pass(given_ptr, into_ptr, box, words, length, BLOCK: tl.constexpr):
    """A box along rows of `length` words: a word and its two neighbours hold every tap of its four pixels."""
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < words
        place = at % length
        this = tl.load(given_ptr + at, mask=here, other=0)
        before = tl.load(given_ptr + at - 1, mask=here & (place > 0), other=0)
        after = tl.load(given_ptr + at + 1, mask=here & (place < length - 1), other=0)
        before = tl.where(place > 0, before, (this & 255) * FOUR_TIMES)
        after = tl.where(place < length - 1, after, ((this >> 24) & 255) * FOUR_TIMES)
        out = tl.zeros((BLOCK,), tl.int32)
        for number in tl.static_range(4):
            total = tl.zeros((BLOCK,), tl.float32)
            for tap in tl.static_range(2 * REACH + 1):
                total += weighted(byte_of(before, this, after, number + tap + 4 - REACH), box, tap)
            out |= rounded(total) << (8 * number)
        tl.store(into_ptr + at, out, mask=here)
    tl.debug_barrier()


@triton.jit
def column_pass(given_ptr, into_ptr, box, words, length, H, BLOCK: tl.constexpr):
    """A box along columns, with four of them in a word and `length` words to a row."""
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < words
        row = at // length
        zero = tl.zeros((BLOCK,), tl.float32)
        first, second, third, fourth = zero, zero, zero, zero
        for tap in tl.static_range(2 * REACH + 1):
            near = tl.minimum(tl.maximum(row + (tap - REACH), 0), H - 1)
            word = tl.load(given_ptr + at + (near - row) * length, mask=here, other=0)
            first += weighted(word & 255, box, tap)
            second += weighted((word >> 8) & 255, box, tap)
            third += weighted((word >> 16) & 255, box, tap)
            fourth += weighted((word >> 24) & 255, box, tap)
        low = rounded(first) | (rounded(second) << 8)
        tl.store(into_ptr + at, low | (rounded(third) << 16) | (rounded(fourth) << 24), mask=here)
    tl.debug_barrier()


@triton.jit
def blur_kernel(
    image_ptr, out_ptr, scratch_ptr, row_ptr, box_ptr, H, W, WORD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Blur one plane of one image; pointers are to units of `WORD` pixels, and `W` is in pixels."""
    plane = tl.program_id(0)
    length = W // WORD
    units = H * length
    first = (tl.load(row_ptr + plane // 3).to(tl.int64) * 3 + plane % 3) * units
    image_ptr += first
    out_ptr += first
    scratch_ptr += plane.to(tl.int64) * units
    box_ptr += plane // 3 * (2 * REACH + 1)
    # The half up to the middle; the other mirrors it.
    box = tl.load(box_ptr), tl.load(box_ptr + 1), tl.load(box_ptr + 2), tl.load(box_ptr + 3)
    if WORD == 4:
        row_pass(image_ptr, scratch_ptr, box, units, length, BLOCK)
        row_pass(scratch_ptr, out_ptr, box, units, length, BLOCK)
        row_pass(out_ptr, scratch_ptr, box, units, length, BLOCK)
        column_pass(scratch_ptr, out_ptr, box, units, length, H, BLOCK)
        column_pass(out_ptr, scratch_ptr, box, units, length, H, BLOCK)
        column_pass(scratch_ptr, out_ptr, box, units, length, H, BLOCK)
    else:
        byte_pass(image_ptr, scratch_ptr, box, units, 1, W, BLOCK)
        byte_pass(scratch_ptr, out_ptr, box, units, 1, W, BLOCK)
        byte_pass(out_ptr, scratch_ptr, box, units, 1, W, BLOCK)
        byte_pass(scratch_ptr, out_ptr, box, units, W, H, BLOCK)
        byte_pass(out_ptr, scratch_ptr, box, units, W, H, BLOCK)
        byte_pass(scratch_ptr, out_ptr, box, units, W, H, BLOCK)


# The constants of splitmix64, as in `fathoms.data.counter_rng`; signed, since the bits are the same.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def shifted(x, places: tl.constexpr):
    """Logical shift right of a signed integer."""
    return (x >> places) & ((1 << (64 - places)) - 1)


@triton.jit
def uniform(key, number):
    """Draw `number`, from 1 on, of a key: 24 bits in [0, 1)."""
    x = key + number * _GOLDEN
    x = (x ^ shifted(x, 30)) * _MULTIPLY_1
    x = (x ^ shifted(x, 27)) * _MULTIPLY_2
    return shifted(x ^ shifted(x, 31), 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def normal(draw):
    """A standard normal number from a uniform one in steps of 2^-24: sqrt 2 times the inverse of erf.

    Giles 2010, "Approximating the erfinv function", single precision.
    """
    x = 2 * draw - 1 + 5.9604644775390625e-08
    w = -tl.log((1 - x) * (1 + x))
    near = w - 2.5
    p = 3.43273939e-07 + 2.81022636e-08 * near
    p = -3.5233877e-06 + p * near
    p = -4.39150654e-06 + p * near
    p = 0.00021858087 + p * near
    p = -0.00125372503 + p * near
    p = -0.00417768164 + p * near
    p = 0.246640727 + p * near
    p = 1.50140941 + p * near
    far = tl.sqrt(tl.maximum(w, 5.0)) - 3
    q = 0.000100950558 - 0.000200214257 * far
    q = 0.00134934322 + q * far
    q = -0.00367342844 + q * far
    q = 0.00573950773 + q * far
    q = -0.0076224613 + q * far
    q = 0.00943887047 + q * far
    q = 1.00167406 + q * far
    q = 2.83297682 + q * far
    return 1.4142135623730951 * x * tl.where(w < 5, p, q)


@triton.jit
def sample(
    image_ptr, factor_ptr, edge_ptr, key_ptr, image, pixel, y, x, mask, c: tl.constexpr, pixels: tl.constexpr,
    COUNT: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Channel c of an image's pixels, normalised and, inside its rectangles, erased."""
    byte = tl.load(image_ptr + image.to(tl.int64) * (3 * pixels) + c * pixels + pixel, mask, other=0)
    value = tl.load(factor_ptr + 3 + c) + byte.to(tl.float32) * tl.load(factor_ptr + c)
    for box in tl.static_range(COUNT):
        own = edge_ptr + (image * COUNT + box) * 4
        top, bottom = tl.load(own), tl.load(own + 1)
        # Most samples have no rectangle, and a draw costs as much as everything else.
        if bottom > top:
            inside = (y >= top) & (y < bottom) & (x >= tl.load(own + 2)) & (x < tl.load(own + 3))
            if MODE == "const":
                fill = tl.zeros_like(value)
            elif MODE == "rand":
                number = tl.zeros_like(pixel) + box * 3 + c + 1
                fill = normal(uniform(tl.load(key_ptr + image), number.to(tl.int64)))
            else:
                fill = normal(uniform(tl.load(key_ptr + image), (c * pixels + pixel + 1).to(tl.int64)))
            value = tl.where(inside, fill, value)
    return value


@triton.jit
def finish_kernel(
    image_ptr, factor_ptr, edge_ptr, key_ptr, share_ptr, partner_ptr, box_ptr, out_ptr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, MODE: tl.constexpr, MIXED: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """P pixels of an image in all channels.

    A share below zero means cutmix: the partner inside the box, the image outside. Otherwise it is mixup's lambda.
    """
    pixels: tl.constexpr = HEIGHT * WIDTH
    image = tl.program_id(0)
    pixel = tl.program_id(1) * P + tl.arange(0, P)
    mask, y, x = pixel < pixels, pixel // WIDTH, pixel % WIDTH
    share, partner, weight = 1.0, image, tl.zeros((P,), tl.float32) + 1
    if MIXED:
        share, partner = tl.load(share_ptr + image), tl.load(partner_ptr + image)
        box = box_ptr + image * 4
        inside = (
            (y >= tl.load(box)) & (y < tl.load(box + 1)) & (x >= tl.load(box + 2)) & (x < tl.load(box + 3))
        )
        weight = tl.where(share < 0, tl.where(inside, 0.0, 1.0), share)
    for c in tl.static_range(3):
        value = sample(
            image_ptr, factor_ptr, edge_ptr, key_ptr, image, pixel, y, x, mask, c, pixels, COUNT, MODE,
        )  # fmt: skip
        # The first condition is known at compile time, the second is not.
        if MIXED:  # noqa: SIM102
            if share != 1:
                other = sample(
                    image_ptr, factor_ptr, edge_ptr, key_ptr, partner, pixel, y, x, mask, c, pixels, COUNT, MODE,
                )  # fmt: skip
                value = tl.where(weight == 1, value, other + (value - other) * weight)
        place = out_ptr + image.to(tl.int64) * (3 * pixels) + c * pixels + pixel
        tl.store(place, value.to(out_ptr.dtype.element_ty), mask)
