"""Module hooks that are removed when a block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


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
