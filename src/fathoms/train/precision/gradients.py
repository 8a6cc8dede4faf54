"""Gradients that do not come from a backward pass directly."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def add_gradients(given: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set the gradients of parameters, or add to those they have; parameters that need none are skipped."""
    # A parameter may come more than once. A multi-tensor addition runs all pairs at once, and would lose one of two
    # that add to the same tensor, so each parameter is in the list once.
    sums: dict[Tensor, Tensor] = {}
    for parameter, gradient in given:
        if parameter.requires_grad:
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
    old, new = [], []
    for parameter, gradient in sums.items():
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            old.append(parameter.grad)
            new.append(gradient)
    if old:
        torch._foreach_add_(old, new)
