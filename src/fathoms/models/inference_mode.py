"""Inference mode of a model for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; after it every module has its previous mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
