"""The closure that an optimizer's `step` may be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that a closure returns, called with gradients enabled as in torch's optimizers; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
