"""Linears: one with a constant factor, multiplications, and whether a call does anything beyond W x + b."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


class ScaledLinear(nn.Linear):
    """A linear whose input is multiplied by a constant: y = W (scale x) + b."""

    def __init__(self, in_features: int, out_features: int, scale: float) -> None:
        super().__init__(in_features, out_features)
        self.scale = scale

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Scale, then multiply."""
        return super().forward(x * self.scale)

    def plain(self) -> nn.Linear:
        """A plain linear that computes the same, the scale in its weights."""
        linear = nn.Linear(self.in_features, self.out_features).to(self.weight)
        linear.weight.data.copy_(self.weight.data * self.scale)
        linear.bias.data.copy_(self.bias.data)
        return linear


def linear_flops(linear: nn.Linear, num_tokens: int) -> int:
    """Multiplications of a linear on `num_tokens` tokens, its constant factor included."""
    scaled = int(isinstance(linear, ScaledLinear))
    return num_tokens * linear.in_features * (linear.out_features + scaled)


def is_bare(linear: nn.Module) -> bool:
    """Whether a call of the linear is W x + b and nothing else, so that its weights can be used directly."""
    # Some libraries replace `forward` on the instance to move weights between devices.
    return type(linear) is nn.Linear and not has_hooks(linear) and "forward" not in linear.__dict__


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
    return any(hooks)
