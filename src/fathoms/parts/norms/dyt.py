"""DyT and Derf: bounded pointwise functions in place of a norm."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.parts.norms.norm import NORMS


def _check_alpha(part: str, init: float) -> float:
    if isinstance(init, str):
        raise ConfigError(f"{part}: init={init!r} is not a number; give the initial alpha, for example 0.5")
    return float(init)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift; a norm whose affine parameters were folded away has neither."""
    return x if weight is None or bias is None else x * weight + bias


@NORMS.add("dyt")
class DyT(nn.Module):
    """Dynamic tanh: y = weight * tanh(alpha * x) + bias, one alpha for all channels.

    Args:
        dim: Number of channels.
        init: Initial alpha.

    >>> DyT(192)(torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Zhu et al. 2025, arXiv:2503.10622.
    """

    affine_names = ("weight", "bias")

    def __init__(self, dim: int, init: float = 0.5) -> None:
        super().__init__()
        self.dim, self.init = dim, _check_alpha("dyt", init)
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Alpha at `init`, weight one, bias zero."""
        nn.init.constant_(self.alpha, self.init)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Apply the function to each element."""
        return _affine(torch.tanh(x * self.alpha), self.weight, self.bias).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Two multiplications per element: alpha, and the weight where there is one."""
        return (1 if self.weight is None else 2) * num_tokens * self.dim


@NORMS.add("derf")
class Derf(nn.Module):
    """Dynamic erf: y = weight * erf(alpha * x + shift) + bias, alpha and shift for all channels.

    Args:
        dim: Number of channels.
        init: Initial alpha; the shift starts at zero.

    >>> Derf(192)(torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Chen et al. 2025, "Stronger Normalization-Free Transformers", arXiv:2512.10938.
    """

    affine_names = ("weight", "bias")

    def __init__(self, dim: int, init: float = 0.5) -> None:
        super().__init__()
        self.dim, self.init = dim, _check_alpha("derf", init)
        self.alpha = nn.Parameter(torch.empty(1))
        self.shift = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Alpha at `init`, shift zero, weight one, bias zero."""
        nn.init.constant_(self.alpha, self.init)
        nn.init.zeros_(self.shift)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Apply the function to each element."""
        return _affine(torch.erf(x * self.alpha + self.shift), self.weight, self.bias).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Two multiplications per element: alpha, and the weight where there is one."""
        return (1 if self.weight is None else 2) * num_tokens * self.dim
