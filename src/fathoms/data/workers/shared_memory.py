"""Memory that worker processes fill and a device reads: slots of equal size, shared and, for a GPU, pinned."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

# Gives room for bytes of some shape; what is in it is not defined.
Make = Callable[[Sequence[int]], Tensor]


def make_room(pin: bool) -> Make:
    """Room in this process's own memory, pinned for a GPU or not."""
    return lambda shape: torch.empty(tuple(shape), dtype=torch.uint8, pin_memory=pin)


class Arena:
    """Slots of `room` bytes, made before the processes that are to share them.

    The memory is anonymous: no file has to be removed and no limit of /dev/shm applies.
    """

    def __init__(self, slots: int, room: int, pin: bool) -> None:
        # Whole pages, which is what a device takes.
        self.room = -(-max(1, room) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bytes = torch.frombuffer(mmap.mmap(-1, slots * self.room), dtype=torch.uint8)
        self._pinned = pin
        if pin:
            _cuda("cudaHostRegister", self._bytes.data_ptr(), self._bytes.numel(), 0)

    def slot(self, number: int) -> Tensor:
        """All bytes of a slot."""
        return self._bytes[number * self.room : (number + 1) * self.room]

    def make(self, number: int) -> Make:
        """Room at the beginning of a slot: what is asked for later lies where the earlier did."""
        return lambda shape: self.slot(number)[: prod(shape)].view(tuple(shape))

    def close(self) -> None:
        """Let go of the pinning; the memory goes with the last tensor that looks at it."""
        if self._pinned:
            self._pinned = False
            _cuda("cudaHostUnregister", self._bytes.data_ptr())


def _cuda(name: str, *arguments: int) -> None:
    """Call a function of CUDA's runtime; raises what goes wrong."""
    torch.cuda.check_error(int(getattr(torch.cuda.cudart(), name)(*arguments)))
