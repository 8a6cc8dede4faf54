"""Linears and activations of a branch: plain, or with Fixup's scalar shifts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Shift(nn.Module):
    """Add one learned number to every element: y = x + shift."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at zero."""
        nn.init.zeros_(self.shift)

    def forward(self, x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Shift x."""
        return (x + self.shift).to(x.dtype)


class ShiftedLinear(nn.Linear):
    """A linear whose input is shifted by one learned number first: y = W (x + shift).

    Fixup puts scalar shifts where a norm would have put its vector bias, so the linear has none of its
    own unless asked.

    Paper: Zhang et al. 2019, arXiv:1901.09321.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.pre = Shift()

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Shift, then multiply."""
        return super().forward(self.pre(x))


@dataclass(frozen=True)
class Layers:
    """Factories of a branch's linears and activations."""

    linear: Callable[..., nn.Linear] = nn.Linear
    activation: Callable[[nn.Module], nn.Module] = lambda activation: activation


PLAIN = Layers()
SHIFTED = Layers(ShiftedLinear, lambda activation: nn.Sequential(Shift(), activation))
