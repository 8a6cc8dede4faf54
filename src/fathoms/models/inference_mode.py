"""A model in inference for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; behind it every module has its own mode again, whatever it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
