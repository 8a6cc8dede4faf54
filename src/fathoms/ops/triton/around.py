"""What kernels need around them: launches; and for talking-heads attention layouts and simple gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fathoms.ops.dispatch import interpreting


def compile_options(warps: int, stages: int) -> dict[str, Any]:
    """What every kernel with matrix products is compiled with."""
    # Three tf32 products are as exact as float32 and run on the tensor cores; 16-bit inputs ignore this.
    return {"PRECISION": "widened" if interpreting() else "tf32x3", **launch_options(warps, stages)}


def launch_options(warps: int, stages: int) -> dict[str, Any]:
    """What every kernel is started with."""
    return {
        "num_warps": warps,
        "num_stages": stages,
        # The default of both Triton 3.6 and 3.9, which would warn that it is to change.
        "enable_fp_fusion": True,
    }


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **compiled: Any) -> None:
    """Start a kernel where its first tensor is; to a type checker its parameters are the ones seen on the device."""
    # A grid without programs cannot be started.
    if math.prod(grid) == 0:
        return
    # Triton starts kernels on the current device, and that may be another one.
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **compiled)


def rows(x: Tensor) -> Tensor:
    """`x` with its channels next to each other; views of a packed qkv tensor are taken as they are.

    Kernels find the place of an image in 64 bits and the places in it in 32: an image that lies wider apart is copied.
    """
    reach = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x if x.stride(3) == 1 and reach < 2**31 else x.contiguous()


def empty_like_rows(q: Tensor) -> Tensor:
    """Room for an output (B, H, N, K), stored as (B, N, H, K) for the projection that follows."""
    batch, heads, tokens, channels = q.shape
    return q.new_empty(batch, tokens, heads, channels).transpose(1, 2)


def empty_gradients(q: Tensor, logit_weight: Tensor, prob_weight: Tensor) -> tuple[Tensor, ...]:
    """Room for the gradients of q, k, v and both mixing matrices, for tracing."""
    dq, dk, dv = (empty_like_rows(q) for _ in range(3))
    return dq, dk, dv, *(weight.new_empty(weight.shape) for weight in (logit_weight, prob_weight))


def bias_gradients(
    grad: Tensor, v: Tensor, logit_bias: Tensor | None, prob_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Of the logits' bias, which cancels in the softmax, and of the other, which adds b[g] Σ_n v[g, n] to every row."""
    zero = None if logit_bias is None else torch.zeros_like(logit_bias)
    if prob_bias is None:
        return zero, None
    sums = grad.sum(2, dtype=torch.float32) * v.sum(2, dtype=torch.float32)
    return zero, sums.sum((0, 2)).to(prob_bias.dtype)
