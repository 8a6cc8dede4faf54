"""Device functions of talking-heads attention: heads side by side in registers, mixed on the tensor cores.

The tiles of all heads lie in the registers of the threads that made them. To mix heads, four keys of every
head are put side by side, X = (rows, 4 H), and multiplied by the Kronecker product of the mixing matrix and
the 4x4 identity. In the tensor cores' own register layout the four threads of a group hold four pairs of
neighbouring columns of a row, so laying the even (or the odd) columns of all heads side by side moves no data
between threads, if pairs of heads take the place of the pairs of columns. Mixing then runs on the tensor
cores, instead of as H*H scalar multiply-adds per position.

Letters: R rows of the resident tile, C of the streamed one, HP heads padded to a power of two, G heads that
one program accumulates. A head's channels K are taken in two parts, KA and KB, because 48 = 32 + 16 needs a
quarter fewer registers than 64. Logits are in base 2: `factor` is scale * log2(e).

A tile is "folded" as (2 C/8 R, 4 heads), or "open" as (2, C/8, R, heads/2, 4, 2): its column is
8 * open[1] + 2 * open[4] + open[0], its head 2 * open[3] + open[5].
"""

# Triton compiles the branch that a constant takes only if the other one stands under an else (RET505), and knows
# tuples only by concatenation (RUF005, SIM108). Formulas keep their letters (D403).
# ruff: noqa: D403, RET505, RUF005, SIM108

# Device code: to a type checker its constants are constexpr objects and its tensors unknown.
# pyrefly: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_head(ptr, rows, stride, N, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr):
    """Rows of one head in one or two column parts, zero outside."""
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
def store_part(ptr, rows, first, stride, N, x, K: tl.constexpr):
    """Write the channels from `first` on of one head."""
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


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """x yᵀ over the parts of the channels: one head's logits."""
    s = matmul(x[0], tl.trans(y[0]), None, PRECISION)
    if len(x) == 2:
        s = matmul(x[1], tl.trans(y[1]), s, PRECISION)
    return s


@triton.jit
def join_heads(tiles):
    """Tiles (R, C), one per head, as one tensor (R, C, heads)."""
    H: tl.constexpr = len(tiles)
    R: tl.constexpr = tiles[0].shape[0]
    C: tl.constexpr = tiles[0].shape[1]
    if H == 1:
        return tl.reshape(tiles[0], (R, C, 1))
    else:
        return tl.reshape(tl.join(join_heads(tiles[0::2]), join_heads(tiles[1::2])), (R, C, H))


@triton.jit
def split_heads(x):
    """The inverse of `join_heads`: a tuple of tiles (R, C)."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    H: tl.constexpr = x.shape[2]
    if H == 1:
        return (tl.reshape(x, (R, C)),)
    else:
        even, odd = tl.split(tl.reshape(x, (R, C, H // 2, 2)))
        evens = split_heads(even)
        odds = split_heads(odd)
        tiles = ()
        for i in tl.static_range(H // 2):
            tiles = tiles + (evens[i], odds[i])
        return tiles


@triton.jit
def fold(tiles):
    """Tiles (R, C), one per head, as one folded tile."""
    H: tl.constexpr = len(tiles)
    R: tl.constexpr = tiles[0].shape[0]
    J: tl.constexpr = tiles[0].shape[1] // 8
    x = tl.reshape(join_heads(tiles), (R, J, 4, 2, H // 2, 2))
    return tl.reshape(tl.permute(x, (3, 1, 0, 4, 2, 5)), (2 * J * R, H * 4))


@triton.jit
def open_fold(x, R: tl.constexpr):
    """A folded tile as (2, C/8, R, heads/2, 4, 2)."""
    J: tl.constexpr = x.shape[0] // (2 * R)
    H: tl.constexpr = x.shape[1] // 4
    return tl.reshape(x, (2, J, R, H // 2, 4, 2))


@triton.jit
def close_fold(x):
    """The inverse of `open_fold`."""
    return tl.reshape(x, (2 * x.shape[1] * x.shape[2], x.shape[3] * 8))


@triton.jit
def unfold(x, R: tl.constexpr):
    """The inverse of `fold`."""
    J: tl.constexpr = x.shape[0] // (2 * R)
    H: tl.constexpr = x.shape[1] // 4
    x = tl.permute(open_fold(x, R), (2, 1, 4, 0, 3, 5))
    return split_heads(tl.reshape(x, (R, J * 8, H)))


@triton.jit
def sum_columns(x):
    """The sum of an open tile over its columns, (R, heads)."""
    return tl.reshape(tl.sum(tl.sum(tl.sum(x, 0), 0), 2), (x.shape[2], x.shape[3] * 2))


@triton.jit
def fold_head(i):
    """The head that column `i` of a folded tile belongs to."""
    return i // 8 * 2 + i % 2


@triton.jit
def fold_key(i):
    """Which of the four keys of that head it is."""
    return i // 2 % 4


@triton.jit
def mixer(
    w_ptr,
    first,
    H: tl.constexpr,
    HP: tl.constexpr,
    G: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    dtype: tl.constexpr,
):
    """w ⊗ I_4 as the right factor of a folded tile; its columns are the heads `first` ... `first + G`."""
    r = tl.arange(0, HP * 4)[:, None]
    c = tl.arange(0, G * 4)[None, :]
    h = fold_head(r)
    g = first + fold_head(c)
    at = h * H + g if TRANSPOSED else g * H + h
    return tl.load(w_ptr + at, mask=(h < H) & (g < H) & (fold_key(r) == fold_key(c)), other=0.0).to(dtype)


@triton.jit
def fold_products(xs, ys, HP: tl.constexpr, PRECISION: tl.constexpr):
    """x yᵀ of every head, folded, in the dtype of x; heads that do not exist are zero.

    The sum over an axis of one is there because Triton takes an operand that was joined for packed 4-bit
    numbers, and gives it a layout that has to be shuffled; it does not look behind a sum.
    """
    tiles = ()
    for h in tl.static_range(HP):
        if h < len(xs):
            tiles = tiles + (product(xs[h], ys[h], PRECISION),)
        else:
            tiles = tiles + (tl.zeros_like(tiles[0]),)
    x = fold(tiles)
    x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], 1)), 2)
    return x.to(xs[0][0].dtype)


@triton.jit
def load_heads(
    ptr, rows, stride_h, stride_n, N, H: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr
):
    """Rows of every head, as a tuple of `load_head`s."""
    heads = ()
    for h in tl.static_range(H):
        heads = heads + (load_head(ptr + h * stride_h, rows, stride_n, N, K, KA, KB),)
    return heads


@triton.jit
def row_statistic(ptr, rows, N, H: tl.constexpr, HP: tl.constexpr):
    """A (H, N) statistic for resident queries, (R, HP)."""
    h = tl.arange(0, HP)
    return tl.load(
        ptr + h[None, :] * N + rows[:, None], mask=(h < H)[None, :] & (rows < N)[:, None], other=0.0
    )


@triton.jit
def along_rows(x):
    """(R, HP) ready to meet an open tile."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2))[None, None, :, :, None, :]


@triton.jit
def column_statistic(ptr, first, N, J: tl.constexpr, H: tl.constexpr, HP: tl.constexpr):
    """A (H, N) statistic for streamed queries, ready to meet an open tile."""
    odd = tl.arange(0, 2)[:, None, None, None, None]
    block = tl.arange(0, J)[None, :, None, None, None]
    pair = tl.arange(0, 4)[None, None, None, :, None]
    rows = first + 8 * block + 2 * pair + odd
    h = 2 * tl.arange(0, HP // 2)[None, None, :, None, None] + tl.arange(0, 2)[None, None, None, None, :]
    return tl.load(ptr + h * N + rows, mask=(h < H) & (rows < N), other=0.0)[:, :, None, :, :, :]


@triton.jit
def probabilities(s, mix, factor, lse, R: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr):
    """exp2(factor * mixed logits - lse), open.

    BOUNDED by one, as every true probability is, keeps streamed keys that do not exist finite: their logit
    is zero, whatever lse is, and what they are multiplied with is zero too.
    """
    exponent = open_fold(matmul(s, mix, None, PRECISION), R) * factor - lse
    if BOUNDED:
        exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(exponent)


@triton.jit
def accumulators(G: tl.constexpr, R: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr):
    """Zeros for G heads: the first parts of all heads, then the second ones."""
    parts = ()
    for _ in tl.static_range(G):
        parts = parts + (tl.zeros((R, KA), tl.float32),)
    if KB > 0:
        for _ in tl.static_range(G):
            parts = parts + (tl.zeros((R, KB), tl.float32),)
    return parts


@triton.jit
def accumulate(parts, tiles, zs, PRECISION: tl.constexpr):
    """Add tile @ z to every head's accumulators; of padded heads there is nothing to add."""
    G: tl.constexpr = len(tiles)
    first_parts = ()
    second_parts = ()
    for i in tl.static_range(G):
        if i < len(zs):
            first_parts = first_parts + (matmul(tiles[i], zs[i][0], parts[i], PRECISION),)
            if len(zs[i]) == 2:
                second_parts = second_parts + (matmul(tiles[i], zs[i][1], parts[G + i], PRECISION),)
        else:
            first_parts = first_parts + (parts[i],)
            if len(zs[0]) == 2:
                second_parts = second_parts + (parts[G + i],)
    return first_parts + second_parts


@triton.jit
def load_group(
    ptr, first, rows, stride_h, stride_n, N,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Rows of the heads `first` ... `first + G`."""
    heads = ()
    for i in tl.static_range(min(G, H)):
        limit = N if G >= H else tl.where(first + i < H, N, 0)
        heads = heads + (load_head(ptr + (first + i) * stride_h, rows, stride_n, limit, K, KA, KB),)
    return heads


@triton.jit
def store_accumulators(
    parts, factor, ptr, first, rows, stride_h, stride_n, N,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Write factor times the accumulators of the heads that exist."""
    for i in tl.static_range(G):
        g = first + i
        limit = tl.where(g < H, N, 0)
        store_part(ptr + g * stride_h, rows, 0, stride_n, limit, parts[i] * factor, K)
        if KB > 0:
            store_part(ptr + g * stride_h, rows, KA, stride_n, limit, parts[G + i] * factor, K)
