"""Class attention without materialising keys or values: their projections are applied to the few queries instead."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fathoms.names.registry import check_name
from fathoms.ops.autocast import as_written, product_dtype
from fathoms.ops.dispatch import in_forward_mode
from fathoms.ops.softmax_attention import attend

ClassAttentionImpl = Literal["auto", "absorbed", "reference"]


def class_attention(
    q: Float[Tensor, "B H Q K"],
    queries: Float[Tensor, "B Q D"] | None,
    context: Float[Tensor, "B N D"],
    key_weight: Float[Tensor, "E D"],
    key_bias: Float[Tensor, " E"] | None,
    value_weight: Float[Tensor, "E D"],
    value_bias: Float[Tensor, " E"] | None,
    *,
    impl: ClassAttentionImpl = "auto",
) -> Float[Tensor, "B H Q K"]:
    """softmax(q kᵀ / sqrt K) v per head, with k and v the projections of the queries and of the context.

    "absorbed" moves both projections to the queries' side, where there is little to project: a logit is
    q·(W x + b) = (Wᵀ q)·x + q·b, and Σ p (W x + b) = W (Σ p x) + b, since a row's probabilities sum to one. q·b is
    the same for a whole row and cancels in the softmax, so the gradient of the key bias is zero. The context is read
    as it is and kept once for the gradient; nothing else of its size is made but its own gradient.

    Products with the context take it in the dtype of q, or autocast's, and accumulate in float32; tensors as small as
    the queries are float32 (float64 stays float64). The output has the dtype of those products.

    Args:
        q: The queries, projected, split into heads and normalised.
        queries: The query tokens, which attend to each other too; None if the context holds them.
        impl: "absorbed", "reference", or "auto": absorbed where `pays` says so.

    Paper: Touvron et al. 2021, arXiv:2103.17239.
    """
    check_name(impl, get_args(ClassAttentionImpl), "implementation", "class_attention")
    if impl == "reference" or (impl == "auto" and not pays(q.shape[2], q.shape[1], context.shape[2])):
        return class_attention_reference(q, queries, context, key_weight, key_bias, value_weight, value_bias)
    return _absorbed(q, queries, context, key_weight, key_bias, value_weight, value_bias)


def pays(queries: int, heads: int, dim: int) -> bool:
    """Whether "auto" absorbs: a projection takes D² multiplications a token, an absorbed one Q H D."""
    return 4 * queries * heads <= dim


def class_attention_reference(
    q: Float[Tensor, "B H Q K"],
    queries: Float[Tensor, "B Q D"] | None,
    context: Float[Tensor, "B N D"],
    key_weight: Float[Tensor, "E D"],
    key_bias: Float[Tensor, " E"] | None,
    value_weight: Float[Tensor, "E D"],
    value_bias: Float[Tensor, " E"] | None,
) -> Float[Tensor, "B H Q K"]:
    """The same with keys and values, through softmax attention."""
    read = [context] if queries is None else [queries, context]
    k = torch.cat([F.linear(x, key_weight, key_bias) for x in read], dim=1)
    v = torch.cat([F.linear(x, value_weight, value_bias) for x in read], dim=1)
    k, v = (x.unflatten(-1, (q.shape[1], -1)).transpose(1, 2) for x in (k, v))
    return attend(q, k, v)


def _absorbed(
    q: Tensor,
    queries: Tensor | None,
    context: Tensor,
    key_weight: Tensor,
    key_bias: Tensor | None,
    value_weight: Tensor,
    value_bias: Tensor | None,
) -> Tensor:
    _, heads, count, width = q.shape
    dtype = product_dtype(q)
    wide = torch.promote_types(dtype, torch.float32)
    context = context.to(dtype)
    with as_written(q):
        own = (context[:, :0] if queries is None else queries).to(wide)
        key, value = (weight.to(wide).unflatten(0, (heads, width)) for weight in (key_weight, value_weight))
        asked = torch.einsum("bhqk,hkd->bhqd", q.to(wide) * width**-0.5, key).flatten(1, 2)
        gathered, probs = _gather(asked, asked @ own.mT, context, key_bias)
        seen = (gathered + probs[..., : own.shape[1]] @ own).unflatten(1, (heads, count))
        out = torch.einsum("bhqd,hkd->bhqk", seen, value)
        if value_bias is not None:
            out = out + value_bias.to(wide).unflatten(0, (heads, 1, width))
    return out.to(dtype)


def _gather(
    asked: Tensor, own_logits: Tensor, context: Tensor, key_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Σ p x over the context for each row of `asked`, and the row's probabilities p, its own logits' first."""
    given = (asked, own_logits, context, key_bias)
    wanted = any(x is not None and x.requires_grad for x in given)
    if wanted and torch.is_grad_enabled() and not in_forward_mode():
        return _Gather.apply(*given)
    return _Gather.forward(*given)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A b in the dtype of `a`, the wider one, without a wide copy of b where the device can do that."""
    if a.dtype == b.dtype:
        return a @ b
    if not _accumulates_wide(b):
        return a @ b.to(a.dtype)
    # Two narrow numbers hold a wide one. Twice as many rows cost nothing: reading b takes the time.
    both = torch.cat(_halves(a, b.dtype), dim=1)
    of_high, of_low = torch.bmm(both, b, out_dtype=a.dtype).chunk(2, dim=1)
    return of_high + of_low


def _halves(a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split float32 into two numbers of a narrower dtype: the leading digits, and the rest.

    The digits are masked by their bits: torch.compile keeps a rounded number unrounded for its next reader, so that
    `a - a.to(dtype)` is zero there.
    """
    spare = 23 + round(math.log2(torch.finfo(dtype).eps))
    high = (a.detach().view(torch.int32) & -(1 << spare)).view(torch.float32)
    return high.to(dtype), (a - high).to(dtype)


def _accumulates_wide(b: Tensor) -> bool:
    """Whether b's device multiplies narrow numbers into wide ones; torch has no forward-mode derivative of it."""
    return b.is_cuda and not in_forward_mode()


class _Gather(torch.autograd.Function):
    """Both products with the context, whose gradient is one product here; autograd would make two and add them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyrefly: ignore
        asked: Tensor, own_logits: Tensor, context: Tensor, key_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        del key_bias
        probs = torch.cat([own_logits, _product(asked, context.mT)], dim=-1).softmax(-1)
        return _product(probs[..., own_logits.shape[-1] :], context), probs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        asked, own_logits, context, key_bias = inputs
        ctx.own = own_logits.shape[-1]
        # The bias cancels. As an input it gets a gradient of zero; DDP would wait for a missing one.
        ctx.save_for_backward(asked, context, key_bias, output[1])

    @staticmethod
    def backward(ctx: Any, of_gathered: Tensor, of_probs: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
        asked, context, key_bias, probs = ctx.saved_tensors
        with as_written(context):
            of_probs = of_probs + F.pad(_product(of_gathered, context.mT), (ctx.own, 0))
            of_logits = probs * (of_probs - (probs * of_probs).sum(-1, keepdim=True))
            of_own, of_other = of_logits[..., : ctx.own], of_logits[..., ctx.own :]
            of_asked = _product(of_other, context) if ctx.needs_input_grad[0] else None
            of_context = None
            if ctx.needs_input_grad[2]:
                left = torch.cat([probs[..., ctx.own :], of_other], dim=1).to(context.dtype)
                of_context = left.mT @ torch.cat([of_gathered, asked], dim=1).to(context.dtype)
        return of_asked, of_own, of_context, None if key_bias is None else torch.zeros_like(key_bias)
