"""A residual join and the norm that reads it in one pass: reference here, kernels in triton/."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fathoms.errors import ShapeError
from fathoms.ops.dispatch import Impl, choose
from fathoms.registry import check_name

Kind = Literal["layernorm", "rmsnorm", "scalenorm", "learnable_scaler", "dyt", "derf"]

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A program holds whole tokens in registers.
MAX_DIM = 8192


def add_norm(
    x: Float[Tensor, "*batch D"],
    branch: Float[Tensor, "*batch D"],
    scale: Float[Tensor, " _"] | None,
    weight: Float[Tensor, " _"] | None,
    bias: Float[Tensor, " D"] | None,
    *,
    kind: Kind,
    alpha: Float[Tensor, " 1"] | None = None,
    shift: Float[Tensor, " 1"] | None = None,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "*batch D"], Float[Tensor, "*batch D"]]:
    """Stream s = x + scale * branch, and normed y = weight * h(s) + bias, h being what norm `kind` does.

    Both have the wider dtype of x and branch; everything between is computed in float32. The backward pass goes over
    the tokens once for the gradients of x and branch and for the sums over tokens that scale, weight and bias
    need, and it is deterministic.

    Args:
        scale: One element per channel (LayerScale) or one for all (ReZero); None adds the branch as it is.
        weight: Of the norm: one element per channel, or one for all (ScaleNorm's g).
        bias: Of the norm.
        kind: "layernorm", "rmsnorm", "scalenorm", "learnable_scaler" (h(s) = s), "dyt" or "derf".
        alpha: Of dyt and derf, h(s) = tanh(alpha s) and erf(alpha s + shift).
        shift: Of derf.
        eps: Of layernorm, rmsnorm and scalenorm.
        impl: "triton", "reference", or "auto": the kernel where it can run.
    """
    check_name(kind, get_args(Kind), "kind", "add_norm")
    dim = x.shape[-1]
    if branch.shape != x.shape:
        raise ShapeError(f"add_norm: x is {tuple(x.shape)} and branch {tuple(branch.shape)}; give one shape")
    given = {"scale": scale, "weight": weight, "bias": bias, "alpha": alpha, "shift": shift}
    for name, parameter in given.items():
        if parameter is not None and parameter.shape not in ((dim,), (1,)):
            raise ShapeError(f"add_norm: {name} is {tuple(parameter.shape)}; give ({dim},) or (1,)")
    if choose("add_norm", impl, x, {"triton": _why_not(x, branch)}) == "reference":
        return add_norm_reference(
            x, branch, scale, weight, bias, kind=kind, alpha=alpha, shift=shift, eps=eps
        )
    # Triton is imported here, so that this module loads where it is not installed.
    from fathoms.ops.triton.add_norm import fused_add_norm

    # One number for all channels is a row of it, and autograd sums what the channels send back.
    wide = {name: None if p is None else p.expand(dim) for name, p in given.items()}
    return fused_add_norm(x, branch, **wide, kind=kind, eps=eps)


def add_norm_reference(
    x: Float[Tensor, "*batch D"],
    branch: Float[Tensor, "*batch D"],
    scale: Float[Tensor, " _"] | None,
    weight: Float[Tensor, " _"] | None,
    bias: Float[Tensor, " D"] | None,
    *,
    kind: Kind,
    alpha: Float[Tensor, " 1"] | None = None,
    shift: Float[Tensor, " 1"] | None = None,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "*batch D"], Float[Tensor, "*batch D"]]:
    """The same in plain torch, in float32 between input and output (float64 stays float64)."""
    dtype = torch.promote_types(x.dtype, branch.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    scaled = branch.to(wide) if scale is None else branch.to(wide) * scale
    stream = (x.to(wide) + scaled).to(dtype)
    s = stream.to(wide)
    if kind == "layernorm":
        h = F.layer_norm(s, s.shape[-1:], eps=eps)
    elif kind == "rmsnorm":
        h = F.rms_norm(s, s.shape[-1:], eps=eps)
    elif kind == "scalenorm":
        h = F.normalize(s, dim=-1, eps=eps)
    elif kind == "learnable_scaler":
        h = s
    else:
        u = s if alpha is None else s * alpha
        u = u if shift is None else u + shift
        h = torch.erf(u) if kind == "derf" else torch.tanh(u)
    y = h if weight is None else h * weight
    return stream, (y if bias is None else y + bias).to(dtype)


def _why_not(x: Tensor, branch: Tensor) -> str | None:
    for name, tensor in (("x", x), ("branch", branch)):
        if tensor.dtype not in KERNEL_DTYPES:
            given = str(tensor.dtype).removeprefix("torch.")
            return f"{name} is {given}, the kernel takes bfloat16, float16 and float32"
    return (
        None if x.shape[-1] <= MAX_DIM else f"{x.shape[-1]} channels are too many, the kernel takes {MAX_DIM}"
    )
