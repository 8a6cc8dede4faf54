"""Launch Triton kernels: on the device of their tensors, with the options every kernel is compiled with."""

from __future__ import annotations

import math
from typing import Any

import torch

from fathoms.ops.dispatch import interpreting


def matmul_options(warps: int, stages: int) -> dict[str, Any]:
    """Compile options of a kernel with matrix products."""
    # Three tf32 products are as exact as float32 and run on the tensor cores; 16-bit inputs ignore this.
    return {"PRECISION": "widened" if interpreting() else "tf32x3", **launch_options(warps, stages)}


def launch_options(warps: int, stages: int) -> dict[str, Any]:
    """Compile options of any kernel."""
    return {
        "num_warps": warps,
        "num_stages": stages,
        # The default of both Triton 3.6 and 3.9, which would warn that it is to change.
        "enable_fp_fusion": True,
    }


def cdiv(whole: int, part: int) -> int:
    """Parts that cover the whole; triton's own, which kernels can call too, takes microseconds of every launch.

    >>> cdiv(9, 4)
    3
    """
    return -(-whole // part)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not less.

    >>> next_power_of_2(1), next_power_of_2(48)
    (1, 64)
    """
    return 1 << max(0, number - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **compiled: Any) -> None:
    """Launch a kernel on the device of its first tensor; to a type checker its parameters are those of the device."""
    # A grid without programs cannot be launched.
    if math.prod(grid) == 0:
        return
    # Triton launches kernels on the current device, which may be another one.
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **compiled)
