"""Host memory for pixels: a process's own, or slots that worker processes fill and a device reads."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

from fathoms.data.crop.pixel_buffer import Allocate


def own_memory(pin: bool) -> Allocate:
    """Memory of this process alone, pinned for a GPU or not."""
    return lambda shape: torch.empty(tuple(shape), dtype=torch.uint8, pin_memory=pin)


class Arena:
    """Slots of `slot_bytes` bytes each, shared with the processes that are forked later; pinned for a GPU.

    The memory is anonymous: no file has to be removed and no limit of /dev/shm applies.
    """

    def __init__(self, slots: int, slot_bytes: int, pin: bool) -> None:
        # Whole pages, because cudaHostRegister takes only these.
        self.slot_bytes = -(-max(1, slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bytes = torch.frombuffer(mmap.mmap(-1, slots * self.slot_bytes), dtype=torch.uint8)
        self._pinned = pin
        if pin:
            _cuda("cudaHostRegister", self._bytes.data_ptr(), self._bytes.numel(), 0)

    def slot(self, number: int) -> Tensor:
        """All bytes of a slot."""
        return self._bytes[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def allocator(self, number: int) -> Allocate:
        """Memory at the start of a slot; each call gives the same bytes again."""
        return lambda shape: self.slot(number)[: prod(shape)].view(tuple(shape))

    def close(self) -> None:
        """Unpin the memory; it is freed with the last tensor that refers to it."""
        if self._pinned:
            self._pinned = False
            _cuda("cudaHostUnregister", self._bytes.data_ptr())


def _cuda(name: str, *arguments: int) -> None:
    """Call a function of the CUDA runtime; raise its error."""
    torch.cuda.check_error(int(getattr(torch.cuda.cudart(), name)(*arguments)))
