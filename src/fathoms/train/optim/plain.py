"""torch's optimizers without the decorators that import its compiler, which takes seconds of every start.

The decorators keep torch.compile out of the methods of an optimizer. No optimizer is compiled here, so the methods
inside them do the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


class PlainOptimizer(torch.optim.Optimizer):
    """The base of all optimizers of this library: torch's, its methods without their decorators."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


_adamw_step = inspect.unwrap(torch.optim.AdamW.step)
_sgd_step = inspect.unwrap(torch.optim.SGD.step)


class AdamW(PlainOptimizer, torch.optim.AdamW):
    """torch's AdamW."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step."""
        return _adamw_step(self, closure)


class SGD(PlainOptimizer, torch.optim.SGD):
    """torch's SGD."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step."""
        return _sgd_step(self, closure)
