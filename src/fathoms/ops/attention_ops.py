"""Attention: softmax, talking heads (heads mixed before and after the softmax), and the class token's.

Torch's fused kernels serve softmax attention, except one whose gradient is wrong at some sizes. Talking heads have
their reference here and kernels in triton_talking_heads.py. Class attention materialises no keys or values: their
projections are applied to the few queries instead.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fathoms.errors import ShapeError
from fathoms.ops.dispatch import (
    Impl,
    as_written,
    choose,
    constant_to_compiler,
    in_dtype,
    in_forward_mode,
    product_dtype,
    why_not_triton,
    wide,
)
from fathoms.registry import check_name


def attend(
    q: Float[Tensor, "B H Q K"], k: Float[Tensor, "B H N K"], v: Float[Tensor, "B H N K"]
) -> Float[Tensor, "B H Q K"]:
    """softmax(q kᵀ / sqrt K) v.

    cuDNN's kernel, torch's first choice on an H100 or H200, makes NaN gradients of finite numbers where the
    number of keys is a multiple of 64 and a row's logits are low (pytorch issue 196678; a ViT on 8x8 patches
    meets it). There, and only there, it is left out.
    """
    if q.is_cuda and k.shape[-2] % 64 == 0:
        with sdpa_kernel(_sound_backends()):
            return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


# A constant to torch.compile, which cannot read the switches itself.
@constant_to_compiler
def _sound_backends() -> list[SDPBackend]:
    """The other backends, without those that are switched off."""
    switches = torch.backends.cuda
    others = {
        SDPBackend.FLASH_ATTENTION: switches.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: switches.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: switches.math_sdp_enabled(),
    }
    return [kernel for kernel, on in others.items() if on]


def leave_out_cudnn_attention() -> ExitStack:
    """Switch that backend off for the whole process, for models that call torch's attention themselves.

    Nothing narrower reaches them: their forward and backward passes run far from where they are built. As a context
    it switches the backend back on at its end, if it was on before.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    restore = ExitStack()
    restore.callback(torch.backends.cuda.enable_cudnn_sdp, before)
    return restore


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
    q, k, v = (in_dtype(x, product_dtype(x)) for x in (q, k, v))
    if choose("talking_heads", impl, why_not_fused(q)) == "reference":
        return talking_heads_reference(q, k, v, logit_weight, logit_bias, prob_weight, prob_bias, scale=scale)
    # Triton is imported here, so that this module loads where it is not installed.
    from fathoms.ops.triton_talking_heads import talking_heads_forward

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
    probs = in_dtype(attention_probabilities(q, k, logit_weight, logit_bias, scale=scale), q.dtype)
    return in_dtype(mix_heads(probs, prob_weight, prob_bias) @ v, q.dtype)


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
    return logits.softmax(-1, dtype=wide(logits.dtype))


def why_not_fused(q: Float[Tensor, "B H N K"]) -> str | None:
    """The reason why `impl="auto"` would run the reference on `q`, or None if it would run the kernels."""
    if reason := why_not_triton(q):
        return reason
    if q.dtype not in KERNEL_DTYPES:
        return f"q is {str(q.dtype).removeprefix('torch.')}, the kernel takes bfloat16, float16 and float32"
    if q.shape[1] > MAX_HEADS:
        return f"{q.shape[1]} heads are too many, the kernel takes up to {MAX_HEADS}"
    return None


def mix_heads(
    maps: Float[Tensor, "B H N M"], weight: Float[Tensor, "H H"], bias: Float[Tensor, " H"] | None
) -> Float[Tensor, "B H N M"]:
    """Mix maps across the heads: out[g] = Σ_h weight[g, h] maps[h] + bias[g], in the dtype of the maps."""
    weight = in_dtype(weight, maps.dtype)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        mixed = torch.einsum("gh,bhmn->bgmn", weight, maps)
    else:
        # Image by image nothing is copied; the gradient of the weights would take three times as long.
        mixed = torch.bmm(weight.expand(maps.shape[0], -1, -1), maps.flatten(2)).view(maps.shape)
    return mixed if bias is None else mixed + in_dtype(bias, maps.dtype)[:, None, None]


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
    # torch.jit.trace and torch's older ONNX exporter would keep the batch that they saw.
    absorbs = not torch.jit.is_tracing() and pays(q.shape[2], q.shape[1], context.shape[2])
    if impl == "reference" or (impl == "auto" and not absorbs):
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
    exact = wide(dtype)
    context = in_dtype(context, dtype)
    with as_written(q):
        own = in_dtype(context[:, :0] if queries is None else queries, exact)
        key, value = (
            in_dtype(weight, exact).unflatten(0, (heads, width)) for weight in (key_weight, value_weight)
        )
        asked = torch.einsum("bhqk,hkd->bhqd", in_dtype(q, exact) * width**-0.5, key).flatten(1, 2)
        gathered, probs = _gather(asked, asked @ own.transpose(-2, -1), context, key_bias)
        seen = (gathered + probs[..., : own.shape[1]] @ own).unflatten(1, (heads, count))
        out = torch.einsum("bhqd,hkd->bhqk", seen, value)
        if value_bias is not None:
            out = out + in_dtype(value_bias, exact).unflatten(0, (heads, 1, width))
    return in_dtype(out, dtype)


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
        probs = torch.cat([own_logits, _product(asked, context.transpose(-2, -1))], dim=-1).softmax(-1)
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
            of_probs = of_probs + F.pad(_product(of_gathered, context.transpose(-2, -1)), (ctx.own, 0))
            of_logits = probs * (of_probs - (probs * of_probs).sum(-1, keepdim=True))
            of_own, of_other = of_logits[..., : ctx.own], of_logits[..., ctx.own :]
            of_asked = _product(of_other, context) if ctx.needs_input_grad[0] else None
            of_context = None
            if ctx.needs_input_grad[2]:
                left = torch.cat([probs[..., ctx.own :], of_other], dim=1).to(context.dtype)
                of_context = left.transpose(-2, -1) @ torch.cat([of_gathered, asked], dim=1).to(context.dtype)
        return of_asked, of_own, of_context, None if key_bias is None else torch.zeros_like(key_bias)
