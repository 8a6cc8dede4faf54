"""Bias and GELU in Triton: kernels, forward and backward, and the torch custom ops that launch them.

A program takes a strip of rows of one tile of columns and walks down it, so that the bias is read once per program and
the column sums stay in registers until its end.

With u = x + bias, Φ the normal distribution function and φ its density: y = u Φ(u), dy/du = Φ(u) + u φ(u).
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathoms.ops.dispatch import launch, launch_options

HALF_LOG2E = tl.constexpr(0.7213475204444817)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
# 1 - Φ(u) = exp(-u²/2) (A1 t + A2 t² + … + A7 t⁷), t = 1 / (1 + SLOPE u), for u ≥ 0: Abramowitz and Stegun 7.1.26
# with two terms more, fitted so that its largest error is 1.5e-8 and, for u < 14.5, 1.2e-5 of the value.
SLOPE = tl.constexpr(0.34)
A1 = tl.constexpr(0.135950178)
A2 = tl.constexpr(0.130532801)
A3 = tl.constexpr(0.153393656)
A4 = tl.constexpr(-0.0242724996)
A5 = tl.constexpr(0.257056057)
A6 = tl.constexpr(-0.196595773)
A7 = tl.constexpr(0.0439355783)


@triton.jit
def tail_and_bell(u):
    """1 - Φ(|u|), without cancellation, and exp(-u²/2)."""
    bell = tl.exp2(u * u * -HALF_LOG2E)
    # Two instructions; a division is eight, most of them for denominators that do not occur here.
    root = tl.rsqrt(tl.abs(u) * SLOPE + 1.0)
    t = root * root
    series = ((((((t * A7 + A6) * t + A5) * t + A4) * t + A3) * t + A2) * t + A1) * t
    return series * bell, bell


@triton.jit
def gelu(u):
    """GELU is u Φ(u): u - u Q for u ≥ 0 and u Q below, Q the tail beyond |u|."""
    return tl.maximum(u, 0.0) - tl.abs(u) * tail_and_bell(u)[0]


@triton.jit
def strip(M, D, STRIP: tl.constexpr, C: tl.constexpr):
    """This program's strip: its first row, the number of rows left from there, and its columns."""
    tiles = tl.cdiv(D, C)
    # Columns run fastest, so that programs that run together read whole rows.
    first = (tl.program_id(0) // tiles).to(tl.int64) * STRIP
    columns = tl.program_id(0) % tiles * C + tl.arange(0, C)
    return first, M - first, columns


@triton.jit
def gelu_kernel(
    x_ptr, bias_ptr, y_ptr, M, D,
    STRIP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Y = gelu(x + bias) for one strip."""
    first, left, columns = strip(M, D, STRIP, C)
    x_ptr += first * D
    y_ptr += first * D
    inside = (columns < D)[None, :]
    if BIASED:
        bias = tl.load(bias_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    for done in tl.range(0, STRIP, R, num_stages=STAGES):
        rows = (done + tl.arange(0, R))[:, None]
        at = rows * D + columns[None, :]
        here = (rows < left) & inside
        u = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
        if BIASED:
            u += bias
        tl.store(y_ptr + at, gelu(u).to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def gelu_grad_kernel(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, share_ptr, M, D,
    STRIP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Dx = grad (Φ + u φ) for one strip, and with a bias its column sums, in float32 and before rounding."""
    first, left, columns = strip(M, D, STRIP, C)
    grad_ptr += first * D
    x_ptr += first * D
    dx_ptr += first * D
    inside = (columns < D)[None, :]
    if BIASED:
        bias = tl.load(bias_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        share = tl.zeros((R, C), tl.float32)
    for done in tl.range(0, STRIP, R, num_stages=STAGES):
        rows = (done + tl.arange(0, R))[:, None]
        at = rows * D + columns[None, :]
        here = (rows < left) & inside
        u = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=here, other=0.0).to(tl.float32)
        if BIASED:
            u += bias
        tail, bell = tail_and_bell(u)
        dx = grad * (tl.where(u < 0.0, tail, 1.0 - tail) + u * (bell * INV_SQRT_2PI))
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=here)
        if BIASED:
            share += dx
    if BIASED:
        tl.store(share_ptr + first // STRIP * D + columns, tl.sum(share, 0), mask=columns < D)


class Tile(NamedTuple):
    """Rows of a program's strip, rows at a time (a divisor of those), columns, warps, stages of the pipeline."""

    strip: int
    rows: int
    columns: int
    warps: int
    stages: int


# By the registers of the kernels compiled for an H200, 54 and 72 a thread: 36 and 28 warps fit a multiprocessor, and
# 16 bytes are moved at a time. Small strips leave no multiprocessor idle at the end; the partial sums stay 1 % of the
# bytes.
TILES = {
    "forward": Tile(64, 32, 128, 4, 1),
    "backward": Tile(128, 16, 128, 4, 1),
}


@torch.library.custom_op("fathoms::bias_gelu", mutates_args=())
def gelu_forward(x: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x + bias), contiguous."""
    x, y = x.contiguous(), x.new_empty(x.shape)
    _launch(gelu_kernel, "forward", x, x, _pointer(bias, x), y, biased=bias is not None)
    return y


@gelu_forward.register_fake
def _(x: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return x.new_empty(x.shape)


@torch.library.custom_op("fathoms::bias_gelu_backward", mutates_args=())
def gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradient of x, and each strip's partial sum of the bias's gradient (strips, D). Deterministic: no atomics."""
    grad, x = grad.contiguous(), x.contiguous()
    dx, shares = _empty_gradients(x, bias)
    _launch(gelu_grad_kernel, "backward", x, grad, x, _pointer(bias, x), dx, shares, biased=bias is not None)
    return dx, shares


@gelu_backward.register_fake
def _(_grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _empty_gradients(x, bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    dx, shares = gelu_backward(grad, x, bias)
    return dx, None if bias is None else shares.sum(0).to(bias.dtype)


gelu_forward.register_autograd(_differentiate, setup_context=_save)


def _empty_gradients(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    strips = 0 if bias is None else _strips(x, TILES["backward"])
    return x.new_empty(x.shape), x.new_empty(strips, x.shape[-1], dtype=torch.float32)


def _strips(x: Tensor, tile: Tile) -> int:
    return triton.cdiv(math.prod(x.shape[:-1]), tile.strip)


def _pointer(bias: Tensor | None, instead: Tensor) -> Tensor:
    """The bias, or any other tensor in its place, which a kernel without a bias does not read."""
    return instead if bias is None else bias.contiguous()


def _launch(
    kernel: Any, name: Literal["forward", "backward"], x: Tensor, *pointers: Tensor, biased: bool
) -> None:
    tile, channels = TILES[name], x.shape[-1]
    programs = _strips(x, tile) * triton.cdiv(channels, tile.columns)
    launch(
        kernel, (programs,), *pointers, math.prod(x.shape[:-1]), channels,
        STRIP=tile.strip, R=tile.rows, C=tile.columns, STAGES=tile.stages, BIASED=biased,
        **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
