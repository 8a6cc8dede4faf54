"""What autocast asks of an operation: in which dtype it takes its tensors, and how it leaves it for a while."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matrix products take `x`: autocast's where it is on, but float64 stays float64."""
    return torch.get_autocast_dtype(x.device.type) if _is_on(x) and x.dtype != torch.float64 else x.dtype


def as_written(x: Tensor) -> AbstractContextManager[object]:
    """Products inside have the dtype of their tensors, also under autocast."""
    return torch.autocast(x.device.type, enabled=False) if _is_on(x) else nullcontext()


def _is_on(x: Tensor) -> bool:
    # A meta tensor, which has sizes and no numbers, knows no autocast.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
