"""Loss, gradient norm and signals of each update, on their way from the device to the host without a wait.

The device decides at once whether an update may happen; the host reads why one update later, when the numbers
have long arrived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fathoms.train.distributed import World, sum_over_ranks


@dataclass(frozen=True)
class Seen:
    """What the host learns of one update, the same on every rank."""

    update: int
    """Its number, counted from 0."""
    epoch: int
    steps: tuple[int, int]
    """Its batches: from, to (excluded)."""
    loss: float
    """Mean over its batches and all ranks."""
    norm: float
    """Norm of the gradient."""
    votes: int
    """Sum over the ranks of what each gave as its vote."""

    @property
    def held(self) -> bool:
        """Whether the device held the update back."""
        return not (math.isfinite(self.loss) and math.isfinite(self.norm))


class Watch:
    """Holds at most one update's numbers: `post` them, and `read` them before the next are posted."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._place: tuple[int, int, tuple[int, int]] | None = None
        on_gpu = world.device.type == "cuda"
        self._event = torch.cuda.Event() if on_gpu else None
        self._host = torch.zeros(3, dtype=torch.float64, pin_memory=on_gpu)

    def post(
        self, update: int, epoch: int, steps: tuple[int, int], loss: Tensor, norm: Tensor, vote: int
    ) -> Tensor:
        """Send an update's numbers; the answer, on the device, is one where it must be held back and else zero."""
        device = self.world.device
        numbers = [loss.double(), norm.double().to(device), torch.full((), vote, device=device).double()]
        sums = sum_over_ranks(self.world, torch.stack(numbers))
        self._host.copy_(sums, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._place = (update, epoch, steps)
        return (~sums.isfinite().all()).float()

    def read(self) -> Seen | None:
        """The numbers posted last, if they were not read yet."""
        if self._place is None:
            return None
        if self._event is not None:
            self._event.synchronize()
        (update, epoch, steps), self._place = self._place, None
        loss, norm, votes = self._host.tolist()
        return Seen(update, epoch, steps, loss / self.world.size, norm / self.world.size, int(votes))
