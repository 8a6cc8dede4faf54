"""Tiles of a matrix in Triton kernels: loads, stores and products of columns that are not a power of two.

Columns are taken in two parts, KA and KB, because 48 = 32 + 16 needs a quarter fewer registers than 64.
"""

# Triton compiles the branch that a constant takes only if the other one stands under an else (RET505). Formulas keep
# their letters (D403).
# ruff: noqa: D403, RET505

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from fathoms.ops.triton.launch import next_power_of_2


def column_parts(columns: int) -> tuple[int, int]:
    """KA and KB, powers of two from 16 on that cover the columns; KB is zero where one part is no wider than two."""
    whole = max(16, next_power_of_2(columns))
    first = whole // 2
    second = max(16, next_power_of_2(max(1, columns - first)))
    return (first, second) if first >= 16 and second < first else (whole, 0)


@triton.jit
def load_rows(ptr, rows, stride, N, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr):
    """Rows of a matrix (N, K) as a tuple of one or two column parts, zero outside."""
    ca = tl.arange(0, KA)
    a = tl.load(
        ptr + rows[:, None] * stride + ca[None, :], mask=(rows < N)[:, None] & (ca < K)[None, :], other=0.0
    )
    if KB == 0:
        return (a,)
    else:
        cb = KA + tl.arange(0, KB)
        b = tl.load(
            ptr + rows[:, None] * stride + cb[None, :],
            mask=(rows < N)[:, None] & (cb < K)[None, :],
            other=0.0,
        )
        return (a, b)


@triton.jit
def store_columns(ptr, rows, first, stride, N, x, K: tl.constexpr):
    """Write x to the columns of a matrix (N, K) from `first` on."""
    c = first + tl.arange(0, x.shape[1])
    at = ptr + rows[:, None] * stride + c[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(rows < N)[:, None] & (c < K)[None, :])


@triton.jit
def matmul(a, b, c, PRECISION: tl.constexpr):
    """a b + c. "widened" is for Triton's interpreter, which multiplies the bits of bfloat16 operands."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    else:
        return tl.dot(a, b, c, input_precision=PRECISION)
