"""A linear's multiplications, and whether calling it does anything beyond W x + b."""

from __future__ import annotations

from torch import nn


def linear_flops(linear: nn.Linear, num_tokens: int) -> int:
    """Multiplications of a linear on `num_tokens` tokens."""
    return num_tokens * linear.in_features * linear.out_features


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
