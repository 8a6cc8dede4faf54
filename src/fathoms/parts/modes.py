"""Hooks and modes of modules for the length of a block, and the refusal of a mode that they do not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle

from fathoms.errors import FathomsError


def refuse_script(module: nn.Module) -> None:
    """Refuse TorchScript, which torch no longer develops, in one line: as `__prepare_scriptable__` of a class."""
    name = type(module).__name__
    raise FathomsError(f"{name}: TorchScript cannot compile it; use torch.export.export, or `fathoms export`")


@contextmanager
def hooked(*handles: RemovableHandle) -> Iterator[None]:
    """Remove the hooks of `handles` on leaving the block, also when it raises.

    >>> from torch import nn, ones
    >>> linear, shapes = nn.Linear(2, 3), []
    >>> with hooked(linear.register_forward_hook(lambda _module, _inputs, out: shapes.append(out.shape))):
    ...     _ = linear(ones(1, 2))
    >>> _ = linear(ones(1, 2))
    >>> shapes
    [torch.Size([1, 3])]
    """
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
