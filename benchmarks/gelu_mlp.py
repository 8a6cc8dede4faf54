"""The whole MLP without gradients, measured for `benchmarks/ops.py`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from fathoms.ops.mlp import gelu_mlp, gelu_mlp_reference
from timing import forward, peak_mib, replay_ms

# Tokens, channels, hidden channels.
MLP_SHAPES = [(50432, 192, 768), (50432, 64, 256), (50432, 128, 512), (50432, 256, 1024)]


def measure_mlp(shape: tuple[int, int, int], limits: dict[str, float]) -> dict[str, Any]:
    """V gelu(W x + b) + c in every implementation, at one shape."""
    torch.compiler.reset()
    torch.manual_seed(0)
    tokens, channels, hidden = shape
    sizes = ((tokens, channels), (hidden, channels), (hidden,), (channels, hidden), (channels,))
    leaves = [torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    leaves = [leaves[0], *(leaf * leaf.shape[-1] ** -0.5 for leaf in leaves[1:])]
    impls = {
        "eager": gelu_mlp_reference,
        "compiled": torch.compile(gelu_mlp_reference, dynamic=False),
        "triton": functools.partial(gelu_mlp, impl="triton"),
    }
    exact = gelu_mlp_reference(*(leaf.double() for leaf in leaves))
    moved = leaves[0].nbytes + sum(leaf.nbytes for leaf in leaves)
    matrix_ms = 4 * tokens * channels * hidden / (limits["matrix_tflops"] * 1e9)
    floor_ms = max(matrix_ms, moved / (limits["copy_tbps"] * 1e9))
    row: dict[str, Any] = {"shape": shape, "floor": {"forward_ms": floor_ms}, "errors": {}}
    for name, impl in impls.items():
        row[name] = {
            "forward_ms": replay_ms(lambda impl=impl: forward(impl, leaves)),
            "peak_mib": peak_mib(lambda impl=impl: forward(impl, leaves)),
        }
        error = (forward(impl, leaves).double() - exact).norm() / exact.norm()
        row["errors"][name] = error.nan_to_num(nan=math.inf).item()
    row["speedup_forward"] = row["compiled"]["forward_ms"] / row["triton"]["forward_ms"]
    row["share_of_floor_forward"] = row["floor"]["forward_ms"] / row["triton"]["forward_ms"]
    return row


def mlp_line(row: dict[str, Any]) -> str:
    """One shape as a line of text."""
    times = [
        f"{name} {row[name]['forward_ms']:.4f} ms {row[name]['peak_mib']:.0f} MiB"
        for name in ("eager", "compiled", "triton")
    ]
    speedup = f"speedup {row['speedup_forward']:.2f}  floor {row['share_of_floor_forward']:.0%}"
    error = f"error {row['errors']['triton'] / row['errors']['eager']:.2f} of eager's"
    return "  ".join([f"gelu_mlp {tuple(row['shape'])}", *times, speedup, error])
