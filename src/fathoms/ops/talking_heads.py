"""Talking-heads attention: heads are mixed before and after the softmax. Reference here, kernels in triton/."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fathoms.errors import ShapeError
from fathoms.ops.autocast import product_dtype
from fathoms.ops.dispatch import MAX_PROGRAMS, Impl, choose, device_shared_memory, why_not_triton

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Tiles of all heads stand in registers together ("triton"), or in one product of the tensor cores ("staged").
MAX_FUSED_HEADS, MAX_STAGED_HEADS = 16, 64


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
    gradient, and its own gradient is zero. Under autocast q, k and v are taken in the autocast dtype, as
    torch's own attention does. Both kernels keep nothing of the maps for the gradient and are deterministic.

    Args:
        scale: factor of the logits, usually K ** -0.5.
        impl: "staged" (the maps of a few images at a time in a scratch of fixed size), "triton" (fully fused, no
            (N, N) map in memory at all, slower), "reference", or "auto": staged where it can run.
            `why_not_fused` tells why "auto" takes the reference.

    Paper: Shazeer et al. 2020, arXiv:2003.02436.
    """
    _check_shapes(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias)
    q, k, v = (x.to(product_dtype(x)) for x in (q, k, v))
    why_not = why_not_triton(q)
    kernels = {
        "staged": why_not or _why_not_staged(q),
        "triton": why_not or (_why_not_fused(q) if impl == "triton" else None),
    }
    chosen = choose("talking_heads", impl, kernels)
    if chosen == "reference":
        return talking_heads_reference(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, scale=scale)
    # Triton is imported here, so that this module loads where it is not installed.
    if chosen == "staged":
        from fathoms.ops.triton.staged import staged_talking_heads as kernel
    else:
        from fathoms.ops.triton.talking_heads import fused_talking_heads as kernel

    return kernel(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, scale)


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
    """The reason why `impl="auto"` would run the reference on `q`, or None if it would run a kernel."""
    return why_not_triton(q) or _why_not_staged(q)


def mix_heads(
    maps: Float[Tensor, "B H N M"], weight: Float[Tensor, "H H"], bias: Float[Tensor, " H"] | None
) -> Float[Tensor, "B H N M"]:
    """Mix maps across the heads: out[g] = Σ_h weight[g, h] maps[h] + bias[g], in the dtype of the maps."""
    mixed = torch.einsum("gh,bhmn->bgmn", weight.to(maps.dtype), maps)
    return mixed if bias is None else mixed + bias.to(maps.dtype)[:, None, None]


def _why_not_staged(q: Tensor) -> str | None:
    if q.dtype not in KERNEL_DTYPES:
        return f"q is {str(q.dtype).removeprefix('torch.')}, the kernel takes bfloat16, float16 and float32"
    if q.shape[1] > MAX_STAGED_HEADS:
        return f"{q.shape[1]} heads are too many, the kernel takes up to {MAX_STAGED_HEADS}"
    return None


def _why_not_fused(q: Tensor) -> str | None:
    heads, head_dim = q.shape[1], q.shape[3]
    if heads > MAX_FUSED_HEADS:
        return f"{heads} heads do not fit in registers, the kernel takes up to {MAX_FUSED_HEADS}"
    if q.shape[0] > MAX_PROGRAMS:
        return f"{q.shape[0]} images are too many, the kernel takes up to {MAX_PROGRAMS}"
    if q.dtype in KERNEL_DTYPES and why_not_triton(q) is None and q.is_cuda:
        need, have = _shared_memory(heads, head_dim, q.dtype, q.device.index)
        if need > have:
            return f"{heads} heads of {head_dim} need {need} bytes of shared memory, the device has {have}"
    return _why_not_staged(q)


# A constant to torch.compile, which does not look inside; a plain function, because it does look inside a cached one.
@torch.compiler.assume_constant_result
def _shared_memory(heads: int, head_dim: int, dtype: torch.dtype, device: int) -> tuple[int, int]:
    """Bytes of shared memory the kernel needs for one program, and the device has."""
    from fathoms.ops.triton.talking_heads_tiles import shared_memory

    return shared_memory(heads, head_dim, dtype), device_shared_memory(device)


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
