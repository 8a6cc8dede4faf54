"""Talking-heads attention as torch custom ops: launches, gradients and shapes for tracing.

The maps of as many images as fit go through a scratch tensor of bounded size. Nothing of them is kept for the
gradient. A kernel that never wrote a map was half as fast (results/deleted.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from fathoms.ops.dispatch import MAX_PROGRAMS, launch, matmul_options
from fathoms.ops.triton_talking_heads_kernels import (
    column_parts,
    inner_kernel,
    mix_grad_kernel,
    mix_kernel,
    outer_kernel,
)

# Bytes of the maps of the images that are processed together; a backward pass needs twice as many.
SCRATCH = 512 << 20
# Keys are padded to a multiple of this: rows of the scratch then start at whole sectors of 32 bytes.
PITCH = 16


class Tile(NamedTuple):
    """Rows (for mixing: iterations of a program), columns (keys at a time), warps, stages of the pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


# By measurement on an H200 at 196 and 576 tokens (benchmarks/talking_heads_tiles.py at dd7d231).
TILES = {
    "outer": Tile(128, 64, 4, 3),
    "inner": Tile(128, 64, 4, 3),
    "mix": Tile(1, 128, 2, 1),
    "grad": Tile(1, 128, 1, 1),
}
# Of mixing up to 256 tokens; rows are then read once in the forward pass.
SHORT = 256
SHORT_TILES = {
    "mix": Tile(1, 256, 4, 1),
    "grad": Tile(1, 64, 1, 1),
}


@torch.library.custom_op("fathoms::talking_heads", mutates_args=())
def talking_heads_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logit_weight: Tensor,
    logit_bias: Tensor | None,  # noqa: ARG001 (here for its gradient, which is zero)
    prob_weight: Tensor,
    prob_bias: Tensor | None,
    scale: float,
) -> Tensor:
    """Output (B, H, N, K), stored as (B, N, H, K) for the projection that follows."""
    q, k, v = rows(q), rows(k), rows(v)
    out = empty_like_rows(q)
    wl, ww = logit_weight.contiguous(), prob_weight.contiguous()
    bw = None if prob_bias is None else prob_bias.contiguous()
    (scratch,) = _scratch(q, 1)
    for part in _parts(q):
        _outer(q[part], k[part], scratch, scale)
        _mix(scratch, q[part], wl, ww, bw)
        _inner(scratch, v[part], out[part], 1.0, transposed=False)
    return out


@talking_heads_forward.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return empty_like_rows(q)


@torch.library.custom_op("fathoms::talking_heads_backward", mutates_args=())
def talking_heads_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logit_weight: Tensor,
    prob_weight: Tensor,
    prob_bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and both mixing matrices. Deterministic: no atomics."""
    grad, q, k, v = rows(grad), rows(q), rows(k), rows(v)
    dq, dk, dv = (empty_like_rows(q) for _ in range(3))
    wl, ww = logit_weight.contiguous(), prob_weight.contiguous()
    bw = None if prob_bias is None else prob_bias.contiguous()
    maps, grads = _scratch(q, 2)
    shares = []
    for part in _parts(q):
        _outer(q[part], k[part], maps, scale)
        _outer(grad[part], v[part], grads, 1.0)
        shares.append(_mix_grad(maps, grads, q[part], wl, ww, bw))
        _inner(maps, grad[part], dv[part], 1.0, transposed=True)
        _inner(grads, k[part], dq[part], scale, transposed=False)
        _inner(grads, q[part], dk[part], scale, transposed=True)
    dwl, dww = torch.cat(shares, 1).sum(1)
    # Copied, because the results of a custom op may not share memory.
    return dq, dk, dv, dwl.to(logit_weight.dtype, copy=True), dww.to(prob_weight.dtype, copy=True)


@talking_heads_backward.register_fake
def _(
    _grad: Tensor, q: Tensor, _k: Tensor, _v: Tensor, logit_weight: Tensor, prob_weight: Tensor, *_: object
) -> tuple[Tensor, ...]:
    dq, dk, dv = (empty_like_rows(q) for _ in range(3))
    return dq, dk, dv, *(weight.new_empty(weight.shape) for weight in (logit_weight, prob_weight))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, scale = inputs
    ctx.save_for_backward(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias)
    ctx.scale = scale


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, logit_weight, logit_bias, prob_weight, prob_bias = ctx.saved_tensors
    weights = logit_weight, prob_weight, prob_bias
    dq, dk, dv, dwl, dww = talking_heads_backward(grad, q, k, v, *weights, ctx.scale)
    dbl, dbw = bias_gradients(grad, v, logit_bias, prob_bias)
    return dq, dk, dv, dwl, dbl, dww, dbw, None


talking_heads_forward.register_autograd(_differentiate, setup_context=_save)


def rows(x: Tensor) -> Tensor:
    """`x` with its channels next to each other; views of a packed qkv tensor are taken as they are.

    Kernels address an image in 64 bits and what is in it in 32: an image that spans more is copied.
    """
    reach = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x if x.stride(3) == 1 and reach < 2**31 else x.contiguous()


def empty_like_rows(q: Tensor) -> Tensor:
    """An empty output (B, H, N, K), stored as (B, N, H, K) for the projection that follows."""
    batch, heads, tokens, channels = q.shape
    return q.new_empty(batch, tokens, heads, channels).transpose(1, 2)


def bias_gradients(
    grad: Tensor, v: Tensor, logit_bias: Tensor | None, prob_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Of the logits' bias, which cancels in the softmax, and of the other, which adds b[g] Σ_n v[g, n] to every row."""
    zero = None if logit_bias is None else torch.zeros_like(logit_bias)
    if prob_bias is None:
        return zero, None
    sums = grad.sum(2, dtype=torch.float32) * v.sum(2, dtype=torch.float32)
    return zero, sums.sum((0, 2)).to(prob_bias.dtype)


def _pitch(tokens: int) -> int:
    return triton.cdiv(tokens, PITCH) * PITCH


def _images(q: Tensor) -> int:
    """Images whose maps fit in the scratch and in a grid; at least one."""
    batch, heads, tokens, _ = q.shape
    fitting = SCRATCH // max(1, heads * tokens * _pitch(tokens) * q.element_size())
    return max(1, min(batch, fitting, MAX_PROGRAMS))


def _scratch(q: Tensor, maps: int) -> Tensor:
    _, heads, tokens, _ = q.shape
    return q.new_empty(maps, _images(q), tokens, heads, _pitch(tokens))


def _parts(q: Tensor) -> Iterator[slice]:
    images = _images(q)
    # A batch without images is one part without images.
    for first in range(0, max(1, q.shape[0]), images):
        yield slice(first, min(first + images, q.shape[0]))


def _outer(x: Tensor, y: Tensor, maps: Tensor, scale: float) -> None:
    batch, heads, tokens, _ = x.shape
    tile, compiled = _constants("outer", x)
    launch(
        outer_kernel, (triton.cdiv(tokens, tile.rows), heads, batch),
        x, y, maps, *x.stride()[:3], *y.stride()[:3], scale, tokens, _pitch(tokens), **compiled,
    )  # fmt: skip


def _inner(maps: Tensor, z: Tensor, out: Tensor, scale: float, *, transposed: bool) -> None:
    batch, heads, tokens, _ = z.shape
    tile, compiled = _constants("inner", z)
    launch(
        inner_kernel, (triton.cdiv(tokens, tile.rows), heads, batch),
        maps, z, out, *z.stride()[:3], *out.stride()[:3], scale, tokens, _pitch(tokens),
        TRANSPOSED=transposed, **compiled,
    )  # fmt: skip


def _mix(maps: Tensor, q: Tensor, wl: Tensor, ww: Tensor, bw: Tensor | None) -> None:
    programs, spans, compiled = _mixing("mix", q)
    tokens, bias = q.shape[2], ww if bw is None else bw
    launch(
        mix_kernel, (programs,), maps, wl, ww, bias, *spans, tokens, _pitch(tokens),
        BIASED=bw is not None, **compiled,
    )  # fmt: skip


def _mix_grad(maps: Tensor, grads: Tensor, q: Tensor, wl: Tensor, ww: Tensor, bw: Tensor | None) -> Tensor:
    """Every program's partial sum of the gradients of the logit and the probability matrix, (2, programs, H, H)."""
    programs, spans, compiled = _mixing("grad", q)
    heads, tokens, bias = q.shape[1], q.shape[2], ww if bw is None else bw
    shares = q.new_empty(2, programs, heads, heads, dtype=torch.float32)
    launch(
        mix_grad_kernel, (programs,), maps, grads, wl, ww, bias, shares[0], shares[1], *spans, tokens, _pitch(tokens),
        BIASED=bw is not None, **compiled,
    )  # fmt: skip
    return shares


def _constants(kernel: Literal["outer", "inner"], x: Tensor) -> tuple[Tile, dict[str, Any]]:
    """The tile of a product, and the constants of its kernel."""
    tile = TILES[kernel] if x.dtype != torch.float32 else Tile(32, 32, 4, 1)
    first, second = column_parts(x.shape[3])
    values = {"H": x.shape[1], "K": x.shape[3], "KA": first, "KB": second, "R": tile.rows, "C": tile.columns}
    return tile, {**values, **matmul_options(tile.warps, tile.stages)}


def _mixing(kernel: Literal["mix", "grad"], q: Tensor) -> tuple[int, tuple[int, int], dict[str, Any]]:
    """Programs of a mixing kernel, the queries of a span and its programs, and the constants of the kernel."""
    batch, heads, tokens, _ = q.shape
    tile = (SHORT_TILES if tokens <= SHORT else TILES)[kernel]
    padded = triton.next_power_of_2(heads)
    side_by_side = max(1, 16 // padded)
    # All images are one span if none of them ends within the queries that are mixed together.
    spans, span = (batch, tokens) if tokens % side_by_side else (1, batch * tokens)
    parts = triton.cdiv(span, side_by_side * tile.rows)
    values = {"H": heads, "HP": padded, "F": side_by_side, "C": tile.columns, "TURNS": tile.rows}
    return spans * parts, (span, parts), {**values, **matmul_options(tile.warps, tile.stages)}
