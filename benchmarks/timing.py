"""Time and peak memory of an operation on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
