"""The whole MLP as a torch custom op: its launch, and its shape for tracing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fathoms.ops.triton.launch import cdiv, launch, matmul_options
from fathoms.ops.triton.mlp_kernels import mlp_kernel
from fathoms.ops.triton.tiles import column_parts

# Tokens and hidden channels of a tile, warps, stages of the pipeline: within 8 % of the best of nine on an H200 for
# each of 64, 128, 192 and 256 channels.
TILE = (128, 32, 8, 3)


@torch.library.custom_op("fathoms::gelu_mlp", mutates_args=())
def fused_gelu_mlp(
    x: Tensor,
    hidden_weight: Tensor,
    hidden_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """`fathoms.ops.mlp.gelu_mlp` through the kernel, contiguous."""
    rows, columns, warps, stages = TILE
    tokens, (hidden, channels) = math.prod(x.shape[:-1]), hidden_weight.shape
    first, second = column_parts(channels)
    y = x.new_empty(x.shape)
    x, hidden_weight, weight = (part.contiguous() for part in (x, hidden_weight, weight))
    # A missing bias is not read: any other tensor takes its place.
    b, c = (x if part is None else part.contiguous() for part in (hidden_bias, bias))
    launch(
        mlp_kernel, (cdiv(tokens, rows),), x, hidden_weight, b, weight, c, y, tokens,
        D=channels, H=hidden, DA=first, DB=second, R=rows, C=columns,
        HIDDEN_BIAS=hidden_bias is not None, BIAS=bias is not None, STAGES=stages,
        **matmul_options(warps, stages),
    )  # fmt: skip
    return y


def shared_memory(channels: int) -> int:
    """Bytes of shared memory of a program: its tokens, and tiles of both matrices for every stage."""
    rows, columns, _, stages = TILE
    return 2 * (rows + 2 * stages * columns) * sum(column_parts(channels))


@fused_gelu_mlp.register_fake
def _(x: Tensor, *_others: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)
