"""Init rules of the linears in a residual branch, one per paper.

A rule is `(branch, depth)`. It fills the weights of an attention or an MLP in place, for a network of
`depth` blocks, which has 2 * depth residual branches; biases become zero. A branch gives its matrices
by role through `roles()`: "q", "k", "v", "gate", "hidden" and "out". Packed matrices give one view per role, so
that every rule sees the shapes of its paper.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fathoms.parts.protocols import Branch

STD = 0.02


def exempt_from_decay(parameter: nn.Parameter) -> None:
    """Mark a parameter that takes no weight decay; `param_groups` reads the mark."""
    parameter._no_weight_decay = True  # pyrefly: ignore[missing-attribute]


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
