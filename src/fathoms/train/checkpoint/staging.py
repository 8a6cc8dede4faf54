"""Copies of device tensors on the host, in page-locked memory that is used again for every checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64 << 20
ALIGN = 64


class HostCopies:
    """`begin`, `take` tensors one after another, `ready` in another thread before the copies are read.

    From a GPU the copies are queued behind the work that makes the tensors and before the work that changes them,
    and nobody waits. On a CPU they are made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[Tensor] = []
        self._block = self._used = 0
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def reserve(self, size: int) -> None:
        """Lock so many bytes of memory now; it takes a while, and is better done before training."""
        if self._event is not None and size > 0:
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def begin(self) -> None:
        """Start anew; what was taken before is overwritten."""
        self._block = self._used = 0

    def take(self, tensor: Tensor) -> Tensor:
        """A copy on the host, whole once `ready` returns."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.clone(memory_format=torch.contiguous_format)
        room = self._room(tensor.numel() * tensor.element_size())
        copy = room.view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """Mark the point at which all copies are made."""
        if self._event is not None:
            self._event.record()

    def ready(self) -> None:
        """Wait until the device has made the copies."""
        if self._event is not None:
            self._event.synchronize()

    def _room(self, size: int) -> Tensor:
        padded = -(-size // ALIGN) * ALIGN
        while self._block < len(self._blocks) and self._used + padded > len(self._blocks[self._block]):
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            self.reserve(max(padded, BLOCK))
        start, self._used = self._used, self._used + padded
        return self._blocks[self._block][start : start + size]
