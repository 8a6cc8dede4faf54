"""Gradients that come from elsewhere than a backward pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def add_gradients(given: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give parameters their gradients, or add to those they have; those that need none are passed over."""
    # A parameter may have several. A GPU adds all pairs of a list at once, and of two that add to one tensor it would
    # lose one: so each parameter stands in the list once.
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
