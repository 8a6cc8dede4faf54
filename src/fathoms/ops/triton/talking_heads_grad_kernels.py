"""Triton kernels of the gradients of talking-heads attention; the method is told in talking_heads_parts.py.

With A the mixed and P the plain probabilities, S the scaled and L the mixed logits:
dA[g] = dout[g] v[g]ᵀ, dP = mix_wᵀ(dA), dL = P (dP - Σ_keys P dP), dS = mix_lᵀ(dL).
Every kernel makes the tiles it needs again from q, k, v, dout and the saved log-sum-exp.
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
    fold_key,
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
def reduce_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, wl_ptr, ww_ptr, lse_ptr, delta_ptr, share_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, factor, N,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_keys P dP (delta), as (B, H, N) float32, and this program's share of the gradient of mix_w's matrix.

    The shares are summed afterwards, in a fixed order: no atomics, so the gradient is deterministic.
    """
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * R + tl.arange(0, R)
    k_ptr += b * k_b
    v_ptr += b * v_b
    q = load_heads(q_ptr + b * q_b, rows, q_h, q_n, N, H, K, KA, KB)
    do = load_heads(do_ptr + b * do_b, rows, do_h, do_n, N, H, K, KA, KB)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    mix_l = mixer(wl_ptr, 0, H, HP, HP, False, dtype)
    unmix_w = mixer(ww_ptr, 0, H, HP, HP, True, dtype)
    lse = along_rows(row_statistic(lse_ptr + b * H * N, rows, N, H, HP))
    delta = tl.zeros((R, HP), tl.float32)
    share = tl.zeros((HP * 4, HP * 4), tl.float32)
    for start in range(0, N, C):
        columns = start + tl.arange(0, C)
        k = load_heads(k_ptr, columns, k_h, k_n, N, H, K, KA, KB)
        s = fold_products(q, k, HP, PRECISION)
        p = probabilities(s, mix_l, factor, lse, R, not EVEN, PRECISION)
        v = load_heads(v_ptr, columns, v_h, v_n, N, H, K, KA, KB)
        da = fold_products(do, v, HP, PRECISION)
        share = matmul(tl.trans(da), close_fold(p.to(dtype)), share, PRECISION)
        delta += sum_columns(p * open_fold(matmul(da, unmix_w, None, PRECISION), R))
    h = tl.arange(0, HP)
    at = delta_ptr + b * H * N + h[None, :] * N + rows[:, None]
    tl.store(at, delta, mask=(h < H)[None, :] & (rows < N)[:, None])
    store_share(share_ptr + (b * tl.num_programs(0) + tl.program_id(0)) * H * H, share, H, HP)


@triton.jit
def store_share(ptr, products, H: tl.constexpr, HP: tl.constexpr):
    """From Xᵀ Y of folded tiles, sum what belongs to one pair of heads (g, h) and to the same key."""
    i = tl.arange(0, HP * 4)
    x = tl.where(fold_key(i)[:, None] == fold_key(i)[None, :], products, 0.0)
    x = tl.sum(tl.sum(tl.reshape(x, (HP // 2, 4, 2, HP // 2, 4, 2)), 4), 1)
    at = tl.arange(0, HP)
    g = tl.reshape(at, (HP // 2, 2))[:, :, None, None]
    h = tl.reshape(at, (HP // 2, 2))[None, None, :, :]
    tl.store(ptr + g * H + h, x, mask=(g < H) & (h < H))


@triton.jit
def apply_grad_kernel(
    x_ptr, y_ptr, u_ptr, t_ptr, wl_ptr, ww_ptr, lse_ptr, delta_ptr, o_ptr, share_ptr,
    x_b, x_h, x_n, y_b, y_h, y_n, u_b, u_h, u_n, t_b, t_h, t_n, o_b, o_h, o_n, factor, scale, N,
    H: tl.constexpr, HP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
    QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply scale dS and y: dq = scale dS k (x, y, u, t = q, k, dout, v), or dk = scale dSᵀ q.

    x and u are resident, y and t streamed. With QUERIES the streamed rows are queries:
    x, y, u, t = k, q, v, dout.
    Without, each program also makes its share of the gradient of mix_l's matrix.
    """
    b = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * G
    J: tl.constexpr = C // 8
    rows = tl.program_id(0) * R + tl.arange(0, R)
    y_ptr += b * y_b
    t_ptr += b * t_b
    lse_ptr += b * H * N
    delta_ptr += b * H * N
    x = load_heads(x_ptr + b * x_b, rows, x_h, x_n, N, H, K, KA, KB)
    u = load_heads(u_ptr + b * u_b, rows, u_h, u_n, N, H, K, KA, KB)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    mix_l = mixer(wl_ptr, 0, H, HP, HP, False, dtype)
    unmix_w = mixer(ww_ptr, 0, H, HP, HP, True, dtype)
    unmix_l = mixer(wl_ptr, first, H, HP, G, True, dtype)
    if not QUERIES:
        lse = along_rows(row_statistic(lse_ptr, rows, N, H, HP))
        delta = along_rows(row_statistic(delta_ptr, rows, N, H, HP))
        share = tl.zeros((HP * 4, HP * 4), tl.float32)
    parts = accumulators(G, R, KA, KB)
    for start in range(0, N, C):
        columns = start + tl.arange(0, C)
        if QUERIES:
            lse = column_statistic(lse_ptr, start, N, J, H, HP)
            delta = column_statistic(delta_ptr, start, N, J, H, HP)
        y = load_heads(y_ptr, columns, y_h, y_n, N, H, K, KA, KB)
        s = fold_products(x, y, HP, PRECISION)
        p = probabilities(s, mix_l, factor, lse, R, not (QUERIES or EVEN), PRECISION)
        t = load_heads(t_ptr, columns, t_h, t_n, N, H, K, KA, KB)
        da = fold_products(u, t, HP, PRECISION)
        dl = close_fold((p * (open_fold(matmul(da, unmix_w, None, PRECISION), R) - delta)).to(dtype))
        if not QUERIES:
            # Programs that share a tile of queries, one per group of heads, take turns along the keys.
            mine = dl if G >= H else tl.where(start // C % tl.num_programs(1) == tl.program_id(1), dl, 0.0)
            share = matmul(tl.trans(mine), s, share, PRECISION)
        ds = matmul(dl, unmix_l, None, PRECISION).to(dtype)
        z = y if QUERIES and G >= H else load_group(y_ptr, first, columns, y_h, y_n, N, G, H, K, KA, KB)
        parts = accumulate(parts, unfold(ds, R), z, PRECISION)
    store_accumulators(parts, scale, o_ptr + b * o_b, first, rows, o_h, o_n, N, G, H, K, KA, KB)
    if not QUERIES:
        program = (b * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        store_share(share_ptr + program * H * H, share * scale, H, HP)
