"""Fused talking-heads attention as torch custom ops: launches, gradients and shapes for tracing."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from fathoms.ops.triton.around import (
    bias_gradients,
    empty_gradients,
    empty_like_rows,
    launch,
    rows,
)
from fathoms.ops.triton.talking_heads_grad_kernels import apply_grad_kernel, reduce_kernel
from fathoms.ops.triton.talking_heads_kernels import apply_kernel, lse_kernel
from fathoms.ops.triton.talking_heads_tiles import constants


def fused_talking_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logit_weight: Tensor,
    logit_bias: Tensor | None,
    prob_weight: Tensor,
    prob_bias: Tensor | None,
    scale: float,
) -> Tensor:
    """`fathoms.ops.talking_heads` through the kernels; the log-sum-exp is kept for the gradient."""
    return talking_heads_forward(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, scale)[0]


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
) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, K), stored as (B, N, H, K) for the projection that follows, and log-sum-exp (B, H, N)."""
    q, k, v = rows(q), rows(k), rows(v)
    out, lse = _empty_outputs(q)
    wl, ww = logit_weight.contiguous(), prob_weight.contiguous()
    bw = ww if prob_bias is None else prob_bias.contiguous()
    factor = scale * math.log2(math.e)

    _reduce_logits(q, k, wl, lse, factor)
    _apply(q, k, v, wl, ww, bw, lse, out, factor, biased=prob_bias is not None, queries=False)
    return out, lse


@talking_heads_forward.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q)


@torch.library.custom_op("fathoms::talking_heads_backward", mutates_args=())
def talking_heads_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logit_weight: Tensor,
    prob_weight: Tensor,
    prob_bias: Tensor | None,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and both mixing matrices. Deterministic: no atomics."""
    grad, q, k, v = rows(grad), rows(q), rows(k), rows(v)
    dq, dk, dv = (empty_like_rows(q) for _ in range(3))
    wl, ww = logit_weight.contiguous(), prob_weight.contiguous()
    bw = ww if prob_bias is None else prob_bias.contiguous()
    factor = scale * math.log2(math.e)

    delta, dww = _reduce_gradients(q, k, v, grad, wl, ww, lse, factor)
    _apply(k, q, grad, wl, ww, bw, lse, dv, factor, biased=prob_bias is not None, queries=True)
    shares = _apply_grad(q, k, grad, v, wl, ww, lse, delta, dq, factor, scale, queries=False)
    _apply_grad(k, q, v, grad, wl, ww, lse, delta, dk, factor, scale, queries=True)
    return dq, dk, dv, shares.sum(0).to(logit_weight.dtype), dww.to(prob_weight.dtype)


@talking_heads_backward.register_fake
def _(
    _grad: Tensor, q: Tensor, _k: Tensor, _v: Tensor, logit_weight: Tensor, prob_weight: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return empty_gradients(q, logit_weight, prob_weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, scale = inputs
    ctx.save_for_backward(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, output[1])
    ctx.scale = scale


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, lse = ctx.saved_tensors
    dq, dk, dv, dwl, dww = talking_heads_backward(
        grad, q, k, v, logit_weight, prob_weight, prob_bias, lse, ctx.scale
    )
    dbl, dbw = bias_gradients(grad, v, logit_bias, prob_bias)
    return dq, dk, dv, dwl, dbl, dww, dbw, None


talking_heads_forward.register_autograd(_differentiate, setup_context=_save)


def _reduce_logits(q: Tensor, k: Tensor, wl: Tensor, lse: Tensor, factor: float) -> None:
    batch, _, tokens, _ = q.shape
    tile, compiled = constants("lse", q)
    launch(
        lse_kernel,
        (triton.cdiv(tokens, tile.rows), batch),
        q,
        k,
        wl,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        factor,
        tokens,
        **compiled,
    )


def _reduce_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    wl: Tensor,
    ww: Tensor,
    lse: Tensor,
    factor: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    tile, compiled = constants("reduce", q)
    cuts = triton.cdiv(tokens, tile.rows)
    delta = torch.empty_like(lse)
    shares = q.new_empty(batch * cuts, heads, heads, dtype=torch.float32)
    launch(
        reduce_kernel, (cuts, batch),
        q, k, v, grad, wl, ww, lse, delta, shares,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3], factor, tokens,
        **compiled,
    )  # fmt: skip
    return delta, shares.sum(0)


def _apply(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    wl: Tensor,
    ww: Tensor,
    bw: Tensor,
    lse: Tensor,
    out: Tensor,
    factor: float,
    *,
    biased: bool,
    queries: bool,
) -> None:
    batch, heads, tokens, _ = x.shape
    tile, compiled = constants("apply", x)
    launch(
        apply_kernel, (triton.cdiv(tokens, tile.rows), triton.cdiv(heads, tile.group), batch),
        x, y, z, wl, ww, bw, lse, out,
        *x.stride()[:3], *y.stride()[:3], *z.stride()[:3], *out.stride()[:3], factor, tokens,
        BIASED=biased, QUERIES=queries, **compiled,
    )  # fmt: skip


def _apply_grad(
    x: Tensor,
    y: Tensor,
    u: Tensor,
    t: Tensor,
    wl: Tensor,
    ww: Tensor,
    lse: Tensor,
    delta: Tensor,
    out: Tensor,
    factor: float,
    scale: float,
    *,
    queries: bool,
) -> Tensor:
    batch, heads, tokens, _ = x.shape
    tile, compiled = constants("apply_grad", x)
    grid = triton.cdiv(tokens, tile.rows), triton.cdiv(heads, tile.group), batch
    shares = x.new_empty(0 if queries else math.prod(grid), heads, heads, dtype=torch.float32)
    launch(
        apply_grad_kernel, grid,
        x, y, u, t, wl, ww, lse, delta, out, shares,
        *x.stride()[:3], *y.stride()[:3], *u.stride()[:3], *t.stride()[:3], *out.stride()[:3],
        factor, scale, tokens,
        QUERIES=queries, **compiled,
    )  # fmt: skip
    return shares


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)
