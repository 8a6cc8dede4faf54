"""Bias and GELU as torch custom ops: launches, gradients and shapes for tracing."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fathoms.ops.triton.gelu_kernels import gelu_grad_kernel, gelu_kernel
from fathoms.ops.triton.launch import cdiv, launch, launch_options


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
    return cdiv(math.prod(x.shape[:-1]), tile.strip)


def _pointer(bias: Tensor | None, instead: Tensor) -> Tensor:
    """The bias, or any other tensor in its place, which a kernel without a bias does not read."""
    return instead if bias is None else bias.contiguous()


def _launch(
    kernel: Any, name: Literal["forward", "backward"], x: Tensor, *pointers: Tensor, biased: bool
) -> None:
    tile, channels = TILES[name], x.shape[-1]
    programs = _strips(x, tile) * cdiv(channels, tile.columns)
    launch(
        kernel, (programs,), *pointers, math.prod(x.shape[:-1]), channels,
        STRIP=tile.strip, R=tile.rows, C=tile.columns, STAGES=tile.stages, BIASED=biased,
        **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
