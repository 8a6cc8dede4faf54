"""The operations of `benchmarks/ops.py` that are measured without gradients: an MLP, a product added to a stream."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fathoms.ops.add_product import add_product, add_product_reference
from fathoms.ops.mlp import gelu_mlp, gelu_mlp_reference
from timing import forward, peak_mib, replay_ms

# Tokens, channels, hidden channels.
MLP_SHAPES = [(50432, 192, 768), (50432, 64, 256), (50432, 128, 512), (50432, 256, 1024)]
# Tokens, channels of the stream, channels of the branch: the ends of the branches of ViT-Ti, S and B, and fewer tokens.
SUM_SHAPES = [(50432, width, wide) for width in (192, 384, 768) for wide in (width, 4 * width)]
SUM_SHAPES += [(tokens, 192, wide) for tokens in (2048, 8192, 16384, 32768) for wide in (192, 768)]


def measure_mlp(shape: tuple[int, int, int], limits: dict[str, float]) -> dict[str, Any]:
    """V gelu(W x + b) + c in every form, at one shape."""
    tokens, channels, hidden = shape
    sizes = ((tokens, channels), (hidden, channels), (hidden,), (channels, hidden), (channels,))
    fused = functools.partial(gelu_mlp, impl="triton")
    flops = 4 * tokens * channels * hidden
    return measure_forward(shape, sizes, gelu_mlp_reference, fused, flops, limits)


def measure_sum(shape: tuple[int, int, int], limits: dict[str, float]) -> dict[str, Any]:
    """A stream and a linear added to it, in every form, at one shape."""
    tokens, channels, wide = shape
    sizes = ((tokens, channels), (tokens, wide), (channels, wide), (channels,))

    def reference(x: Tensor, a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return add_product_reference(x, a, weight.T, bias)

    def fused(x: Tensor, a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return add_product(x, a, weight.T, bias, impl="cublas")

    return measure_forward(shape, sizes, reference, fused, 2 * tokens * channels * wide, limits)


def measure_forward(
    shape: tuple[int, ...],
    sizes: tuple[tuple[int, ...], ...],
    reference: Callable[..., Tensor],
    fused: Callable[..., Tensor],
    flops: int,
    limits: dict[str, float],
) -> dict[str, Any]:
    """An operation without gradients in every form: random inputs of `sizes`, the first as large as the output."""
    torch.compiler.reset()
    torch.manual_seed(0)
    leaves = [torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    leaves = [leaf if leaf.shape[0] == shape[0] else leaf * leaf.shape[-1] ** -0.5 for leaf in leaves]
    forms = {"eager": reference, "compiled": torch.compile(reference, dynamic=False), "fused": fused}
    exact = reference(*(leaf.double() for leaf in leaves))
    moved = leaves[0].nbytes + sum(leaf.nbytes for leaf in leaves)
    floor_ms = max(flops / (limits["matrix_tflops"] * 1e9), moved / (limits["copy_tbps"] * 1e9))
    row: dict[str, Any] = {"shape": shape, "floor": {"forward_ms": floor_ms}, "errors": {}}
    for name, form in forms.items():
        row[name] = {
            "forward_ms": replay_ms(lambda form=form: forward(form, leaves)),
            "peak_mib": peak_mib(lambda form=form: forward(form, leaves)),
        }
        off = (forward(form, leaves).double() - exact).norm() / exact.norm()
        row["errors"][name] = off.nan_to_num(nan=math.inf).item()
    row["speedup_forward"] = row["compiled"]["forward_ms"] / row["fused"]["forward_ms"]
    row["share_of_floor_forward"] = row["floor"]["forward_ms"] / row["fused"]["forward_ms"]
    return row


def forward_line(op: str, row: dict[str, Any]) -> str:
    """One shape of an operation without gradients for a reader."""
    forms = [
        f"{name} {row[name]['forward_ms']:.4f} ms {row[name]['peak_mib']:.0f} MiB"
        for name in ("eager", "compiled", "fused")
    ]
    worst = f"error {row['errors']['fused'] / row['errors']['eager']:.2f} of unfused"
    speedup = f"speedup {row['speedup_forward']:.2f}  floor {row['share_of_floor_forward']:.0%}"
    return "  ".join([f"{op} {tuple(row['shape'])}", *forms, speedup, worst])
