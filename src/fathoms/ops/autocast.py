"""Dtypes inside an operation: of its matrix products under autocast, and of its statistics."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with `x`: autocast's where it is on, except that float64 stays float64."""
    return torch.get_autocast_dtype(x.device.type) if is_on(x) and x.dtype != torch.float64 else x.dtype


def widened(x: Tensor) -> Tensor:
    """X in float32, or in float64 if it is: for statistics and losses."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_written(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products have the dtype of their tensors, also under autocast."""
    return torch.autocast(x.device.type, enabled=False) if is_on(x) else nullcontext()


def is_on(x: Tensor) -> bool:
    """Whether autocast is on for operations with `x`."""
    # There is no autocast for the meta device.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
