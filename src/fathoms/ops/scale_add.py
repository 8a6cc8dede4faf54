"""Add a scaled branch to the residual stream in one pass over memory: x + gamma * branch."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fathoms.ops.dispatch import in_forward_mode


def scale_add(
    x: Float[Tensor, "*batch D"], gamma: Float[Tensor, " D"], branch: Float[Tensor, "*batch D"]
) -> Float[Tensor, "*batch D"]:
    """Join a branch to the stream: x + gamma * branch.

    Multiplied first and added then, gamma * branch is written and read again: five passes over the tokens.
    Here there are three. torch has the operation, but its backward multiplies the branch by one first; the one
    here does what that of the plain form does.
    """
    wanted = x.requires_grad or gamma.requires_grad or branch.requires_grad
    if wanted and torch.is_grad_enabled() and not in_forward_mode():
        return _ScaleAdd.apply(x, gamma, branch)
    return torch.addcmul(x, gamma, branch)


def scale_add_reference(
    x: Float[Tensor, "*batch D"], gamma: Float[Tensor, " D"], branch: Float[Tensor, "*batch D"]
) -> Float[Tensor, "*batch D"]:
    """The same in plain torch."""
    return x + gamma * branch


class _ScaleAdd(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gamma: Tensor, branch: Tensor) -> Tensor:  # pyrefly: ignore
        return torch.addcmul(x, gamma, branch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        x, gamma, branch = inputs
        ctx.stream_dtype = x.dtype
        ctx.save_for_backward(gamma, branch)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
        gamma, branch = ctx.saved_tensors
        of_x, of_gamma, of_branch = ctx.needs_input_grad
        return (
            grad.to(ctx.stream_dtype) if of_x else None,
            (grad * branch).sum_to_size(gamma.shape).to(gamma.dtype) if of_gamma else None,
            (grad * gamma).to(branch.dtype) if of_branch else None,
        )
