"""Linears of the residual branches: their multiplications, Fixup's shifts, and the init rules, one per paper.

An init rule is `(branch, depth)`. It fills the weights of an attention or an MLP in place, for a network of
`depth` blocks, which has 2 * depth residual branches; biases become zero. A branch gives its matrices
by role through `roles()`: "q", "k", "v", "gate", "hidden" and "out". Packed matrices give one view per role, so
that every rule sees the shapes of its paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fathoms.ops.dispatch import in_dtype
from fathoms.parts.protocols import Branch

_FORWARD = nn.Linear.forward


def linear_flops(linear: nn.Linear | ShiftedLinear, num_tokens: int) -> int:
    """Multiplications of a linear on `num_tokens` tokens."""
    return num_tokens * linear.in_features * linear.out_features


def is_bare(linear: nn.Module) -> bool:
    """Whether a call of the linear is W x + b and nothing else, so that its weights can be used directly."""
    return (
        type(linear) is nn.Linear
        and not has_hooks(linear)
        # Some libraries replace `forward`, on the instance or for all linears.
        and "forward" not in linear.__dict__
        and nn.Linear.forward is _FORWARD
        # Quantised weights multiply by a rule of their own.
        and not is_traceable_wrapper_subclass(linear.weight)
    )


def is_exact_gelu(module: nn.Module) -> bool:
    """Whether a call of the module is the exact GELU and nothing else."""
    return type(module) is nn.GELU and module.approximate == "none" and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its own forward and backward."""
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return any(hooks) or bool(torch.nn.modules.module._has_any_global_hook())


class Shift(nn.Module):
    """Add one learned number to every element: y = x + shift."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)

    def forward(self, x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        return in_dtype(x + self.shift, x.dtype)


class ShiftedLinear(nn.Sequential):
    """A linear with a learned number in front, which is added to its input: y = W (x + shift).

    Fixup puts scalar shifts where a norm would have put its vector bias, so the linear has none of its
    own unless asked.

    Paper: Zhang et al. 2019, arXiv:1901.09321.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.pre = Shift()
        self.linear = nn.Linear(in_features, out_features, bias)

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias


@dataclass(frozen=True)
class Layers:
    """Factories of a branch's linears and activations, and whether q, k and v may have a vector bias."""

    linear: Callable[..., Any] = nn.Linear
    qkv_bias: bool = True
    activation: Callable[[nn.Module], nn.Module] = lambda activation: activation


PLAIN = Layers()
SHIFTED = Layers(ShiftedLinear, False, lambda activation: nn.Sequential(Shift(), activation))


STD = 0.02


Rule = Callable[[Branch, int], None]


def trunc_normal(branch: Branch, depth: int) -> None:
    """Truncated normal with deviation 0.02, at any depth: the init of ViT, DeiT and CaiT."""
    del depth
    for _, weight in branch.roles():
        nn.init.trunc_normal_(weight, std=STD)


def xavier(branch: Branch, depth: int) -> None:
    """Xavier uniform, the init of ReZero's transformer."""
    del depth
    for _, weight in branch.roles():
        nn.init.xavier_uniform_(weight)


def he(branch: Branch, depth: int) -> None:
    """He normal by fan-in, the init of SkipInit's residual branches."""
    del depth
    for _, weight in branch.roles():
        nn.init.kaiming_normal_(weight, nonlinearity="relu")


def fixup(branch: Branch, depth: int) -> None:
    """Xavier, q, k, v times (2L)^-1/6, the MLP's first layer times (2L)^-1/2, the last layer zero."""
    power = {"hidden": -1 / 2, "q": -1 / 6, "k": -1 / 6, "v": -1 / 6}
    for role, weight in branch.roles():
        if role == "out":
            nn.init.zeros_(weight)
        else:
            nn.init.xavier_uniform_(weight, gain=(2 * depth) ** power.get(role, 0))


def tfixup(branch: Branch, depth: int) -> None:
    """Xavier, then 0.67 L^-1/4 on the values, the output and both MLP layers.

    The sqrt(2) on the values in the authors' code only undoes the gain 1/sqrt(2) that fairseq gives q, k and v; it
    stays on q and k there, where the paper has plain Xavier, as here.
    """
    scale = 0.67 * depth**-0.25
    for role, weight in branch.roles():
        nn.init.xavier_uniform_(weight, gain=1.0 if role in ("q", "k") else scale)


def deepnorm(branch: Branch, depth: int) -> None:
    """Xavier normal, divided by (8L)^1/4 on the values, the output and both MLP layers."""
    shrink = (8 * depth) ** -0.25
    for role, weight in branch.roles():
        nn.init.xavier_normal_(weight, gain=1.0 if role in ("q", "k", "gate") else shrink)
