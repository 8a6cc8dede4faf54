"""Triton kernels of the forward pass of talking-heads attention; the method is told in talking_heads_parts.py.

No (N, N) map leaves the chip: one pass over the keys for the log-sum-exp of the mixed logits, one for the output.
"""

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from fathoms.ops.triton.talking_heads_parts import (
    accumulate,
    accumulators,
    along_rows,
    close_fold,
    column_statistic,
    fold_head,
    fold_products,
    load_group,
    load_heads,
    matmul,
    mixer,
    open_fold,
    probabilities,
    row_statistic,
    store_accumulators,
    sum_columns,
    unfold,
)


@triton.jit
def lse_kernel(
    q_ptr, k_ptr, wl_ptr, lse_ptr, q_b, q_h, q_n, k_b, k_h, k_n, factor, N,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """log2 Σ exp2 of each row of mixed logits, (B, H, N) float32."""
    b = tl.program_id(1).to(tl.int64)
    J: tl.constexpr = C // 8
    rows = tl.program_id(0) * R + tl.arange(0, R)
    q = load_heads(q_ptr + b * q_b, rows, q_h, q_n, N, H, K, KA, KB)
    mix = mixer(wl_ptr, 0, H, HP, HP, False, q[0][0].dtype)
    odd = tl.arange(0, 2)[:, None, None, None, None, None]
    pair = tl.arange(0, 4)[None, None, None, None, :, None]
    key = 8 * tl.arange(0, J)[None, :, None, None, None, None] + 2 * pair + odd
    top = tl.full((R, HP), float("-inf"), tl.float32)
    total = tl.zeros((R, HP), tl.float32)
    for start in range(0, N, C):
        k = load_heads(k_ptr + b * k_b, start + tl.arange(0, C), k_h, k_n, N, H, K, KA, KB)
        s = fold_products(q, k, HP, PRECISION)
        logits = open_fold(matmul(s, mix, None, PRECISION), R) * factor
        if not EVEN:
            logits = tl.where(start + key < N, logits, float("-inf"))
        highest = tl.max(tl.max(tl.max(logits, 0), 0), 2)
        new = tl.maximum(top, tl.reshape(highest, (R, HP)))
        total = total * tl.exp2(top - new) + sum_columns(tl.exp2(logits - along_rows(new)))
        top = new
    h = tl.arange(0, HP)
    tl.store(
        lse_ptr + b * H * N + h[None, :] * N + rows[:, None],
        top + tl.log2(total),
        mask=(h < H)[None, :] & (rows < N)[:, None],
    )


@triton.jit
def apply_kernel(
    x_ptr, y_ptr, z_ptr, wl_ptr, ww_ptr, bw_ptr, lse_ptr, o_ptr,
    x_b, x_h, x_n, y_b, y_h, y_n, z_b, z_h, z_n, o_b, o_h, o_n, factor, N,
    H: tl.constexpr, HP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
    BIASED: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The mixed probabilities A times something: out = A v (x, y, z = q, k, v), or dv = Aᵀ dout.

    With QUERIES the streamed rows are queries and the resident ones keys: x, y, z = k, q, dout.
    One program makes G heads; a program for all of them would not have the registers.
    """
    b = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * G
    J: tl.constexpr = C // 8
    rows = tl.program_id(0) * R + tl.arange(0, R)
    lse_ptr += b * H * N
    x = load_heads(x_ptr + b * x_b, rows, x_h, x_n, N, H, K, KA, KB)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    mix_l = mixer(wl_ptr, 0, H, HP, HP, False, dtype)
    mix_w = mixer(ww_ptr, first, H, HP, G, False, dtype)
    if not QUERIES:
        lse = along_rows(row_statistic(lse_ptr, rows, N, H, HP))
    parts = accumulators(G, R, KA, KB)
    for start in range(0, N, C):
        columns = start + tl.arange(0, C)
        if QUERIES:
            lse = column_statistic(lse_ptr, start, N, J, H, HP)
        y = load_heads(y_ptr + b * y_b, columns, y_h, y_n, N, H, K, KA, KB)
        s = fold_products(x, y, HP, PRECISION)
        p = probabilities(s, mix_l, factor, lse, R, not (QUERIES or EVEN), PRECISION).to(dtype)
        mixed = matmul(close_fold(p), mix_w, None, PRECISION)
        if BIASED:
            g = first + fold_head(tl.arange(0, G * 4))
            mixed += tl.load(bw_ptr + g, mask=g < H, other=0.0)[None, :]
        z = load_group(z_ptr + b * z_b, first, columns, z_h, z_n, N, G, H, K, KA, KB)
        parts = accumulate(parts, unfold(mixed.to(dtype), R), z, PRECISION)
    store_accumulators(parts, 1.0, o_ptr + b * o_b, first, rows, o_h, o_n, N, G, H, K, KA, KB)
