"""Triton kernel for Gaussian blur: three box blurs along the rows and three along the columns, rounded after each.

One program blurs one plane, alternating between its place in the result and its share of a scratch buffer. That takes
a barrier between two passes, where separate launches would each cost host time. Planes whose rows are whole words are
read four bytes at a time.
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from fathoms.data.augment import filters

ROUND_MARGIN = tl.constexpr(filters.ROUND_MARGIN)
REACH = tl.constexpr(filters.REACH)
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
