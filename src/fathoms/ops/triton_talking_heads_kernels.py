"""Triton kernels of talking-heads attention: products, mixing of whole rows, products.

The maps of a few images are in a scratch tensor (image, query, head, key), its rows padded to `P` keys so that
they start at whole sectors. A mixing program holds F queries of all heads at a time, 16 rows or more, and
multiplies them from the left by I_F ⊗ w: heads are along the tensor cores' rows, so no tile is moved between
threads to be mixed, and no product is padded where the heads are a power of two. The zeros of I_F ⊗ w make a NaN
of what is not finite, so the F queries are always of one image: a NaN stays in its own.

With S the scaled logits, L = w_l S, P = softmax L, A = w_w P and dA = dout vᵀ:
dP = w_wᵀ dA, dL = P (dP - Σ_keys P dP), dS = w_lᵀ dL, dw_w = dA Pᵀ, dw_l = dL Sᵀ.
"""

# Triton compiles the branch that a constant takes only if the other one stands under an else.
# Formulas keep their letters (D403).
# ruff: noqa: D403, RET505

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


def column_parts(columns: int) -> tuple[int, int]:
    """KA and KB, powers of two from 16 on that cover the columns; KB is zero where one part is no wider than two."""
    whole = max(16, triton.next_power_of_2(columns))
    first = whole // 2
    second = max(16, triton.next_power_of_2(max(1, columns - first)))
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
    return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """x yᵀ over the parts of the channels: one head's logits."""
    s = matmul(x[0], tl.trans(y[0]), None, PRECISION)
    if len(x) == 2:
        s = matmul(x[1], tl.trans(y[1]), s, PRECISION)
    return s


@triton.jit
def outer_kernel(
    x_ptr, y_ptr, map_ptr, x_b, x_h, x_n, y_b, y_h, y_n, scale, N, P,
    H: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The map scale x yᵀ of one head of one image; the padding of its rows is zero."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    x = load_rows(x_ptr + b * x_b + h * x_h, rows, x_n, N, K, KA, KB)
    at = map_ptr + ((b * N + rows) * H + h)[:, None] * P
    for start in range(0, P, C):
        columns = start + tl.arange(0, C)
        y = load_rows(y_ptr + b * y_b + h * y_h, columns, y_n, N, K, KA, KB)
        s = product(x, y, PRECISION) * scale
        mask = (rows < N)[:, None] & (columns < P)[None, :]
        tl.store(at + columns[None, :], s.to(map_ptr.dtype.element_ty), mask=mask)


@triton.jit
def inner_kernel(
    map_ptr, z_ptr, o_ptr, z_b, z_h, z_n, o_b, o_h, o_n, scale, N, P,
    H: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product scale map z of one head of one image, or scale mapᵀ z."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    map_ptr += h * P
    z_ptr += b * z_b + h * z_h
    first = tl.zeros((R, KA), tl.float32)
    if KB > 0:
        second = tl.zeros((R, KB), tl.float32)
    for start in range(0, N, C):
        columns = start + tl.arange(0, C)
        if TRANSPOSED:
            at = map_ptr + ((b * N + columns) * (H * P))[:, None] + rows[None, :]
            tile = tl.trans(tl.load(at, mask=(columns < N)[:, None] & (rows < P)[None, :], other=0.0))
        else:
            at = map_ptr + ((b * N + rows) * (H * P))[:, None] + columns[None, :]
            tile = tl.load(at, mask=(rows < N)[:, None] & (columns < P)[None, :], other=0.0)
        z = load_rows(z_ptr, columns, z_n, N, K, KA, KB)
        first = matmul(tile, z[0], first, PRECISION)
        if KB > 0:
            second = matmul(tile, z[1], second, PRECISION)
    o_ptr += b * o_b + h * o_h
    store_columns(o_ptr, rows, 0, o_n, N, first * scale, K)
    if KB > 0:
        store_columns(o_ptr, rows, KA, o_n, N, second * scale, K)


@triton.jit
def block_mixer(
    w_ptr, H: tl.constexpr, HP: tl.constexpr, F: tl.constexpr, TRANSPOSED: tl.constexpr, dtype: tl.constexpr
):
    """I_F ⊗ w, or I_F ⊗ wᵀ, padded with zeros: the left factor that mixes the heads of F queries."""
    i = tl.arange(0, F * HP)[:, None]
    j = tl.arange(0, F * HP)[None, :]
    g = i % HP
    h = j % HP
    at = h * H + g if TRANSPOSED else g * H + h
    return tl.load(w_ptr + at, mask=(g < H) & (h < H) & (i // HP == j // HP), other=0.0).to(dtype)


@triton.jit
def queries_of(
    turn, span, parts, H: tl.constexpr, HP: tl.constexpr, F: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """The query of each row of an iteration's tile, and whether there is such a row.

    Queries lie in spans, which are whole images, and `parts` programs share a span.
    """
    i = tl.arange(0, F * HP)
    within = ((tl.program_id(0) % parts) * TURNS + turn) * F + i // HP
    return (tl.program_id(0) // parts) * span + within, ((within < span) & (i % HP < H))[:, None]


@triton.jit
def mix_kernel(
    map_ptr, wl_ptr, ww_ptr, bw_ptr, span, parts, N: tl.constexpr, P: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, F: tl.constexpr, C: tl.constexpr, TURNS: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S becomes A = w_w softmax(w_l S) + b in place."""
    dtype: tl.constexpr = map_ptr.dtype.element_ty
    i = tl.arange(0, F * HP)
    h = i % HP
    mix_l = block_mixer(wl_ptr, H, HP, F, False, dtype)
    mix_w = block_mixer(ww_ptr, H, HP, F, False, dtype)
    if BIASED:
        bias = tl.load(bw_ptr + h, mask=h < H, other=0.0).to(tl.float32)[:, None]
    for turn in range(TURNS):
        query, here = queries_of(turn, span, parts, H, HP, F, TURNS)
        at = map_ptr + ((query.to(tl.int64) * H + h) * P)[:, None]
        top = tl.full((F * HP,), float("-inf"), tl.float32)
        total = tl.zeros((F * HP,), tl.float32)
        for start in range(0, N, C):
            n = (start + tl.arange(0, C))[None, :]
            s = tl.load(at + n, mask=here & (n < P), other=0.0)
            logits = tl.where(n < N, matmul(mix_l, s, None, PRECISION) * LOG2E, float("-inf"))
            new = tl.maximum(top, tl.max(logits, 1))
            total = total * tl.exp2(top - new) + tl.sum(tl.exp2(logits - new[:, None]), 1)
            top = new
        lse = (top + tl.log2(total))[:, None]
        for start in range(0, N, C):
            n = (start + tl.arange(0, C))[None, :]
            s = tl.load(at + n, mask=here & (n < P), other=0.0)
            logits = tl.where(n < N, matmul(mix_l, s, None, PRECISION) * LOG2E, float("-inf"))
            a = matmul(mix_w, tl.exp2(logits - lse).to(dtype), None, PRECISION)
            if BIASED:
                a += bias
            tl.store(at + n, a.to(dtype), mask=here & (n < P))


@triton.jit
def mix_grad_kernel(
    map_ptr, grad_ptr, wl_ptr, ww_ptr, bw_ptr, dwl_ptr, dww_ptr, span, parts, N: tl.constexpr, P: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, F: tl.constexpr, C: tl.constexpr, TURNS: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """In place S becomes A and dA becomes dS; each program writes its partial sum of both matrices' gradients."""
    dtype: tl.constexpr = map_ptr.dtype.element_ty
    i = tl.arange(0, F * HP)
    h = i % HP
    mix_l = block_mixer(wl_ptr, H, HP, F, False, dtype)
    mix_w = block_mixer(ww_ptr, H, HP, F, False, dtype)
    unmix_l = block_mixer(wl_ptr, H, HP, F, True, dtype)
    unmix_w = block_mixer(ww_ptr, H, HP, F, True, dtype)
    if BIASED:
        bias = tl.load(bw_ptr + h, mask=h < H, other=0.0).to(tl.float32)[:, None]
    share_l = tl.zeros((F * HP, F * HP), tl.float32)
    share_w = tl.zeros((F * HP, F * HP), tl.float32)
    for turn in range(TURNS):
        query, here = queries_of(turn, span, parts, H, HP, F, TURNS)
        offset = ((query.to(tl.int64) * H + h) * P)[:, None]
        top = tl.full((F * HP,), float("-inf"), tl.float32)
        total = tl.zeros((F * HP,), tl.float32)
        delta = tl.zeros((F * HP,), tl.float32)
        for start in range(0, N, C):
            n = (start + tl.arange(0, C))[None, :]
            s = tl.load(map_ptr + offset + n, mask=here & (n < P), other=0.0)
            da = tl.load(grad_ptr + offset + n, mask=here & (n < P), other=0.0)
            logits = tl.where(n < N, matmul(mix_l, s, None, PRECISION) * LOG2E, float("-inf"))
            dp = matmul(unmix_w, da, None, PRECISION)
            new = tl.maximum(top, tl.max(logits, 1))
            shrink = tl.exp2(top - new)
            p = tl.exp2(logits - new[:, None])
            total = total * shrink + tl.sum(p, 1)
            delta = delta * shrink + tl.sum(p * dp, 1)
            top = new
        lse = (top + tl.log2(total))[:, None]
        delta = (delta / total)[:, None]
        for start in range(0, N, C):
            n = (start + tl.arange(0, C))[None, :]
            s = tl.load(map_ptr + offset + n, mask=here & (n < P), other=0.0)
            da = tl.load(grad_ptr + offset + n, mask=here & (n < P), other=0.0)
            logits = tl.where(n < N, matmul(mix_l, s, None, PRECISION) * LOG2E, float("-inf"))
            p = tl.exp2(logits - lse)
            dl = (p * (matmul(unmix_w, da, None, PRECISION) - delta)).to(dtype)
            p = p.to(dtype)
            a = matmul(mix_w, p, None, PRECISION)
            if BIASED:
                a += bias
            share_w = matmul(da, tl.trans(p), share_w, PRECISION)
            share_l = matmul(dl, tl.trans(s), share_l, PRECISION)
            ds = matmul(unmix_l, dl, None, PRECISION)
            tl.store(map_ptr + offset + n, a.to(dtype), mask=here & (n < P))
            tl.store(grad_ptr + offset + n, ds.to(dtype), mask=here & (n < P))
    at = tl.program_id(0).to(tl.int64) * H * H
    store_blocks(dwl_ptr + at, share_l, H, HP, F)
    store_blocks(dww_ptr + at, share_w, H, HP, F)


@triton.jit
def store_blocks(ptr, x, H: tl.constexpr, HP: tl.constexpr, F: tl.constexpr):
    """Write the sum of the F blocks on the diagonal of x: products of a query with itself."""
    i = tl.arange(0, F * HP)
    x = tl.where((i // HP)[:, None] == (i // HP)[None, :], x, 0.0)
    x = tl.sum(tl.sum(tl.reshape(x, (F, HP, F, HP)), 2), 0)
    g = tl.arange(0, HP)[:, None]
    h = tl.arange(0, HP)[None, :]
    tl.store(ptr + g * H + h, x, mask=(g < H) & (h < H))
