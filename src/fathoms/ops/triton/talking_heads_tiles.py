"""How the kernels of talking-heads attention are cut into tiles, by measurement on an H200 (benchmarks/ops.py)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from fathoms.ops.triton.around import compile_options

Kernel = Literal["lse", "apply", "reduce", "apply_grad"]


class Tile(NamedTuple):
    """Resident rows, streamed rows, heads that one program accumulates, warps, stages of the pipeline."""

    rows: int
    columns: int
    group: int
    warps: int
    stages: int


def tile_for(kernel: Kernel, heads: int, dtype: torch.dtype) -> Tile:
    """The cut of a kernel.

    32 rows on two warps beat 64 on four with eight heads: they take the tensor cores' synchronous instructions,
    which need no wait after each of the many small products. With four heads or fewer the larger tile wins.
    """
    padded = padded_heads(heads)
    if dtype == torch.float32:
        return Tile(16, 16, min(padded, 4), 1, 1)
    if kernel == "lse":
        return Tile(64 if padded == 4 else 32, 32 if padded <= 8 else 16, padded, 4 if padded == 4 else 2, 3)
    if padded == 4:
        return Tile(64, 32, 4, 4, 3) if kernel == "apply" else Tile(32, 16, 4, 2, 3)
    if kernel == "reduce":
        return Tile(32, 16, padded, 2, 3 if heads == 8 else 2)
    return Tile(32, 16, 4 if kernel == "apply" and heads == 8 else 8, 2, 2)


def constants(kernel: Kernel, x: Tensor) -> tuple[Tile, dict[str, Any]]:
    """The cut, and what the kernel is compiled with."""
    _, heads, tokens, channels = x.shape
    tile = tile_for(kernel, heads, x.dtype)
    first, second = channel_parts(channels)
    values: dict[str, Any] = {
        "H": heads,
        "HP": padded_heads(heads),
        "K": channels,
        "KA": first,
        "KB": second,
        "R": tile.rows,
        "C": tile.columns,
        "EVEN": tokens % tile.columns == 0,
        **compile_options(tile.warps, tile.stages),
        # Without this ptxas sometimes settles on 32 registers and spills everything else.
        "maxnreg": 255,
    }
    if kernel in ("apply", "apply_grad"):
        values["G"] = tile.group
    return tile, values


def shared_memory(heads: int, channels: int, dtype: torch.dtype) -> int:
    """Bytes of shared memory that the largest kernel, apply_grad, takes, or a little less."""
    tile = tile_for("apply_grad", heads, dtype)
    rows = 2 * tile.rows + 3 * tile.columns * max(1, tile.stages - 1)
    mixers = 3 * (4 * padded_heads(heads)) ** 2
    shares = 2 * 2 * tile.columns // 8 * tile.rows * 4 * padded_heads(heads)
    return (rows * heads * sum(channel_parts(channels)) + mixers + shares) * dtype.itemsize


def padded_heads(heads: int) -> int:
    """Heads as a power of two; the tensor cores want at least four of them side by side."""
    return max(4, triton.next_power_of_2(heads))


def channel_parts(channels: int) -> tuple[int, int]:
    """Widths, powers of two from 16 on, that cover the channels: two where that is narrower than one."""
    whole = max(16, triton.next_power_of_2(channels))
    first = whole // 2
    second = max(16, triton.next_power_of_2(max(1, channels - first)))
    return (first, second) if first >= 16 and second < first else (whole, 0)
