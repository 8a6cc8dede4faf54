"""Triton kernel that normalises, erases and mixes in one pass: bytes are read once or twice, results written once."""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

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
                fill = normal(uniform(tl.load(key_ptr + image), (tl.zeros_like(pixel) + c + 1).to(tl.int64)))
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
