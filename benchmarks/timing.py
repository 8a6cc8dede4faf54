"""Time and peak memory of an operation on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fathoms.bench import seconds


def forward(impl: Callable[..., Tensor], leaves: list[Tensor]) -> Tensor:
    """One forward pass without gradients."""
    with torch.no_grad():
        return impl(*leaves)


def time_ms(work: Callable[[], object]) -> float:
    """Median time by CUDA events, after warming up and compiling."""
    from triton.testing import do_bench

    work()
    return float(do_bench(work, warmup=30, rep=100, return_mode="median"))


def replay_ms(work: Callable[[], object]) -> float:
    """Median time of replays of a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(work, rep=100, return_mode="median"))


def peak_mib(work: Callable[[], object]) -> float:
    """Memory that one call takes on top of its inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def device_limits() -> dict[str, float]:
    """Matrix and copy rate of the CUDA device, on random data."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(big)
    return {
        "matrix_tflops": 2 * 8192**3 / seconds(lambda: a @ a, 20) / 1e12,
        "copy_tbps": 2 * big.nbytes / seconds(lambda: target.copy_(big), 20) / 1e12,
    }


def shares_of_limit(
    flops: int, peak_gib: float, ms: float, limits: dict[str, float], mode: str
) -> dict[str, float]:
    """The share of an update's time that the matrix units would need at their measured rate, and the memory at its own.

    A backward pass has twice the products of a forward pass. The least that moves is every byte of the peak,
    written once and read once.
    """
    passes = 3 if mode == "train" else 1
    return {
        "matrix_share": 2 * passes * flops / (limits["matrix_tflops"] * 1e9) / ms,
        "bytes_share": 2 * peak_gib * 2**30 / (limits["copy_tbps"] * 1e9) / ms,
    }
