"""A whole MLP in inference, V gelu(W x + b) + c: reference here, the kernel in triton/."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fathoms.errors import ShapeError
from fathoms.ops.autocast import product_dtype
from fathoms.ops.dispatch import Impl, choose, constant_to_compiler, device_shared_memory, why_not_triton

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# The accumulators of all channels of a tile stay in registers, which hold no more.
MAX_CHANNELS = 256
# A program takes 128 tokens: with fewer tokens than this most multiprocessors of a large GPU are idle, where torch's
# products use smaller tiles.
MIN_TOKENS = 2**14
# The compute capability of the GPU on which the kernel has been measured, an H200.
MEASURED = 9


def gelu_mlp(
    x: Float[Tensor, "*batch D"],
    hidden_weight: Float[Tensor, "H D"],
    hidden_bias: Float[Tensor, " H"] | None,
    weight: Float[Tensor, "D H"],
    bias: Float[Tensor, " D"] | None,
    *,
    impl: Impl = "auto",
) -> Float[Tensor, "*batch D"]:
    """Two linears with an exact GELU between them, in the dtype of x, or autocast's where it is on.

    The kernel is for inference: it saves nothing for a backward pass, and the H hidden activations of a token never
    reach memory. Products take 16-bit numbers and accumulate in float32, the GELU is that of `bias_gelu`; hidden
    activations are rounded once, after the GELU, where the reference rounds before it too.

    Args:
        hidden_weight: W, its bias b.
        weight: V, its bias c.
        impl: "triton", "reference", or "auto": the kernel where it can run and has been measured to be faster.
            `why_not_fused` gives the reason why "auto" takes the reference.

    Paper: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    given = (x, hidden_weight, hidden_bias, weight, bias)
    _check_shapes(*given)
    # An explicit kernel runs wherever it can, "auto" only where it is faster.
    reason = why_not_fused(*given) if impl == "auto" else why_not_triton(x) or _why_not_kernel(*given)
    if choose("gelu_mlp", impl, reason) == "reference":
        return gelu_mlp_reference(*given)
    # Triton is imported here, so that this module loads where it is not installed.
    from fathoms.ops.triton.mlp import fused_gelu_mlp

    return fused_gelu_mlp(*(None if part is None else part.to(product_dtype(x)) for part in given))


def gelu_mlp_reference(
    x: Float[Tensor, "*batch D"],
    hidden_weight: Float[Tensor, "H D"],
    hidden_bias: Float[Tensor, " H"] | None,
    weight: Float[Tensor, "D H"],
    bias: Float[Tensor, " D"] | None,
) -> Float[Tensor, "*batch D"]:
    """The same in plain torch."""
    return F.linear(F.gelu(F.linear(x, hidden_weight, hidden_bias)), weight, bias)


def why_not_fused(
    x: Float[Tensor, "*batch D"],
    hidden_weight: Float[Tensor, "H D"],
    hidden_bias: Float[Tensor, " H"] | None,
    weight: Float[Tensor, "D H"],
    bias: Float[Tensor, " D"] | None,
) -> str | None:
    """The reason why `impl="auto"` would run the reference, or None if it would run the kernel."""
    reason = why_not_triton(x) or _why_not_kernel(x, hidden_weight, hidden_bias, weight, bias)
    return reason or _why_not_faster(x)


def why_not_here(hidden_weight: Float[Tensor, "H D"]) -> str | None:
    """The reason why "auto" would run the reference on every input of such a layer on its device, or None."""
    return why_not_triton(hidden_weight) or _why_too_wide(hidden_weight) or _why_not_measured(hidden_weight)


def _why_not_kernel(x: Tensor, *others: Tensor | None) -> str | None:
    there = [part for part in others if part is not None]
    # The flag itself: in torch 2.11 its function, is_exporting, is true under torch.compile as well.
    if torch.compiler._is_exporting_flag:
        return "the model is being exported, and may run where there is no kernel"
    if torch.is_grad_enabled() and any(part.requires_grad for part in (x, *there)):
        return "gradients are needed, for which the kernel saves nothing"
    if product_dtype(x) not in KERNEL_DTYPES:
        return f"products are in {_name(product_dtype(x))}, the kernel takes bfloat16 and float16"
    if any(is_traceable_wrapper_subclass(part) for part in (x, *there)):
        return "x or a weight is more than a plain tensor"
    if any(product_dtype(part) != product_dtype(x) for part in there):
        return f"x is {_name(product_dtype(x))}, and not all weights are"
    if any(part.device != x.device for part in there):
        return "x and the weights are on different devices"
    return _why_too_wide(x)


def _why_too_wide(x: Tensor) -> str | None:
    most = _most_channels(x.device.index) if x.is_cuda and why_not_triton(x) is None else MAX_CHANNELS
    return f"x has {x.shape[-1]} channels, the kernel takes up to {most}" if x.shape[-1] > most else None


# A constant to torch.compile, which does not look inside; so it is not given a size, which may be dynamic.
@constant_to_compiler
def _most_channels(device: int) -> int:
    """The most channels for which a CUDA device has enough shared memory."""
    return _channels_within(device_shared_memory(device))


@functools.cache
def _channels_within(room: int) -> int:
    from fathoms.ops.triton.mlp import shared_memory

    return max(
        (channels for channels in range(1, MAX_CHANNELS + 1) if shared_memory(channels) <= room), default=0
    )


def _why_not_measured(x: Tensor) -> str | None:
    if x.is_cuda and _capability(x.device.index) != MEASURED:
        return f"the kernel has been measured on GPUs of compute capability {MEASURED} only"
    return None


def _why_not_faster(x: Tensor) -> str | None:
    if reason := _why_not_measured(x):
        return reason
    if math.prod(x.shape[:-1]) < MIN_TOKENS:
        return f"the kernel pays from {MIN_TOKENS} tokens on"
    return None


@constant_to_compiler
def _capability(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_shapes(
    x: Tensor,
    hidden_weight: Tensor,
    hidden_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> None:
    hidden, channels = hidden_weight.shape
    if x.shape[-1:] != (channels,):
        raise ShapeError(
            f"gelu_mlp: x is {tuple(x.shape)}; give (*batch, {channels}), as hidden_weight takes it"
        )
    for name, part, shape in (
        ("hidden_bias", hidden_bias, (hidden,)),
        ("weight", weight, (channels, hidden)),
        ("bias", bias, (channels,)),
    ):
        if part is not None and part.shape != shape:
            raise ShapeError(f"gelu_mlp: {name} is {tuple(part.shape)}; give {tuple(shape)}")
