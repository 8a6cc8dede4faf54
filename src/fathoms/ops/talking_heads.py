"""Talking-heads attention, heads mixed before and after the softmax: reference here, kernels in triton/."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fathoms.errors import ShapeError
from fathoms.ops.autocast import product_dtype
from fathoms.ops.dispatch import Impl, choose, why_not_triton

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# All heads of a query are mixed in one product of the tensor cores.
MAX_HEADS = 64


def talking_heads(
    q: Float[Tensor, "B H N K"],
    k: Float[Tensor, "B H N K"],
    v: Float[Tensor, "B H N K"],
    logit_weight: Float[Tensor, "H H"],
    logit_bias: Float[Tensor, " H"] | None,
    prob_weight: Float[Tensor, "H H"],
    prob_bias: Float[Tensor, " H"] | None,
    *,
    scale: float,
    impl: Impl = "auto",
) -> Float[Tensor, "B H N K"]:
    """Attend with talking heads: out = mix_w(softmax(mix_l(scale q kᵀ))) v, mix(x)[g] = Σ_h w[g, h] x[h] + b[g].

    `logit_bias` is the same for all keys and cancels in the softmax: it changes neither the output nor any
    gradient, and its own gradient is zero. Under autocast q, k and v are cast to its dtype, as in torch's
    own attention. The kernels hold the maps of a few images at a time, in a scratch tensor of fixed
    size, save none for the backward pass and are deterministic.

    Args:
        scale: factor of the logits, usually K ** -0.5.
        impl: "triton", "reference", or "auto": the kernels where they can run. `why_not_fused` gives the reason
            why "auto" takes the reference.

    Paper: Shazeer et al. 2020, arXiv:2003.02436.
    """
    _check_shapes(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias)
    q, k, v = (x.to(product_dtype(x)) for x in (q, k, v))
    if choose("talking_heads", impl, why_not_fused(q)) == "reference":
        return talking_heads_reference(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, scale=scale)
    # Triton is imported here, so that this module loads where it is not installed.
    from fathoms.ops.triton.talking_heads import talking_heads_forward

    return talking_heads_forward(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, scale)


def talking_heads_reference(
    q: Float[Tensor, "B H N K"],
    k: Float[Tensor, "B H N K"],
    v: Float[Tensor, "B H N K"],
    logit_weight: Float[Tensor, "H H"],
    logit_bias: Float[Tensor, " H"] | None,
    prob_weight: Float[Tensor, "H H"],
    prob_bias: Float[Tensor, " H"] | None,
    *,
    scale: float,
) -> Float[Tensor, "B H N K"]:
    """The same in plain torch, the maps in the dtype of q and the softmax in float32 (float64 stays float64)."""
    probs = attention_probabilities(q, k, logit_weight, logit_bias, scale=scale).to(q.dtype)
    return (mix_heads(probs, prob_weight, prob_bias) @ v).to(q.dtype)


def attention_probabilities(
    q: Float[Tensor, "B H N K"],
    k: Float[Tensor, "B H M K"],
    logit_weight: Float[Tensor, "H H"] | None = None,
    logit_bias: Float[Tensor, " H"] | None = None,
    *,
    scale: float,
) -> Float[Tensor, "B H N M"]:
    """The attention map softmax(mix_l(scale q kᵀ)) in float32 (float64 stays float64); no mixing without a weight.

    With talking heads these are the probabilities before the second mixing, after which rows no longer sum to one.
    """
    logits = q * scale @ k.transpose(-2, -1)
    if logit_weight is not None:
        logits = mix_heads(logits, logit_weight, logit_bias)
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def why_not_fused(q: Float[Tensor, "B H N K"]) -> str | None:
    """The reason why `impl="auto"` would run the reference on `q`, or None if it would run the kernels."""
    return why_not_triton(q) or _why_not_kernel(q)


def mix_heads(
    maps: Float[Tensor, "B H N M"], weight: Float[Tensor, "H H"], bias: Float[Tensor, " H"] | None
) -> Float[Tensor, "B H N M"]:
    """Mix maps across the heads: out[g] = Σ_h weight[g, h] maps[h] + bias[g], in the dtype of the maps."""
    mixed = torch.einsum("gh,bhmn->bgmn", weight.to(maps.dtype), maps)
    return mixed if bias is None else mixed + bias.to(maps.dtype)[:, None, None]


def _why_not_kernel(q: Tensor) -> str | None:
    if q.dtype not in KERNEL_DTYPES:
        return f"q is {str(q.dtype).removeprefix('torch.')}, the kernel takes bfloat16, float16 and float32"
    if q.shape[1] > MAX_HEADS:
        return f"{q.shape[1]} heads are too many, the kernel takes up to {MAX_HEADS}"
    return None


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logit_weight: Tensor,
    logit_bias: Tensor | None,
    prob_weight: Tensor,
    prob_bias: Tensor | None,
) -> None:
    if q.dim() != 4 or k.shape != q.shape or v.shape != q.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ShapeError(f"talking_heads: q, k, v are {shapes}; give three of one shape (B, H, N, K)")
    heads = q.shape[1]
    for name, weight in (("logit_weight", logit_weight), ("prob_weight", prob_weight)):
        if weight.shape != (heads, heads):
            raise ShapeError(f"talking_heads: {name} is {tuple(weight.shape)}; give ({heads}, {heads})")
    for name, bias in (("logit_bias", logit_bias), ("prob_bias", prob_bias)):
        if bias is not None and bias.shape != (heads,):
            raise ShapeError(f"talking_heads: {name} is {tuple(bias.shape)}; give ({heads},)")
