"""Triton kernel of a whole MLP, y = V gelu(W x + b) + c: the hidden activations stay on the chip.

A program holds R tokens and accumulators of all D channels, and walks over the hidden channels, C at a time. Channels
are split into two parts, DA and DB, as 192 = 128 + 64: the sides of a tile are powers of two.
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from fathoms.ops.triton.gelu_kernels import gelu
from fathoms.ops.triton.tiles import load_rows, matmul, store_columns


@triton.jit
def load_tile(ptr, rows, columns, N, K: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of a matrix (N, K), zero outside; WHOLE tiles have nothing outside."""
    at = ptr + rows[:, None] * K + columns[None, :]
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    return tl.load(at) if WHOLE else tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_bias(ptr, columns, K: tl.constexpr):
    """A part of a bias, as a row in float32."""
    return tl.load(ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def mlp_kernel(
    x_ptr, w_ptr, b_ptr, v_ptr, c_ptr, y_ptr, M,
    D: tl.constexpr, H: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    HIDDEN_BIAS: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of R tokens."""
    WHOLE: tl.constexpr = DA + DB == D and H % C == 0
    first = tl.program_id(0).to(tl.int64) * R
    rows, left = tl.arange(0, R), M - first
    x = load_rows(x_ptr + first * D, rows, D, left, D, DA, DB)
    da = tl.arange(0, DA)
    ya = tl.zeros((R, DA), tl.float32)
    if DB > 0:
        db = DA + tl.arange(0, DB)
        yb = tl.zeros((R, DB), tl.float32)
    for start in tl.range(0, H, C, num_stages=STAGES):
        hidden = start + tl.arange(0, C)
        u = matmul(x[0], tl.trans(load_tile(w_ptr, hidden, da, H, D, WHOLE)), None, PRECISION)
        if DB > 0:
            u = matmul(x[1], tl.trans(load_tile(w_ptr, hidden, db, H, D, WHOLE)), u, PRECISION)
        if HIDDEN_BIAS:
            u += load_bias(b_ptr, hidden, H)
        h = gelu(u).to(x_ptr.dtype.element_ty)
        ya = matmul(h, tl.trans(load_tile(v_ptr, da, hidden, D, H, WHOLE)), ya, PRECISION)
        if DB > 0:
            yb = matmul(h, tl.trans(load_tile(v_ptr, db, hidden, D, H, WHOLE)), yb, PRECISION)
    if BIAS:
        ya += load_bias(c_ptr, da, D)
    store_columns(y_ptr + first * D, rows, 0, D, left, ya, D)
    if DB > 0:
        if BIAS:
            yb += load_bias(c_ptr, db, D)
        store_columns(y_ptr + first * D, rows, DA, D, left, yb, D)
