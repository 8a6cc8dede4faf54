"""Copy the loss and gradient norm of each update from the device to the host without a sync.

The device decides at once whether an update may happen. The host reads the numbers one update later, when they have
long arrived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fathoms.train.distributed import World, sum_over_ranks


@dataclass(frozen=True)
class UpdateReport:
    """One update as the host sees it, the same on every rank."""

    update: int
    """Its number, counted from 0."""
    epoch: int
    batches: tuple[int, int]
    """First and last batch of the epoch that it accumulated, the last excluded."""
    loss: float
    """Mean over its batches and all ranks."""
    norm: float
    """Norm of the gradient."""
    votes: int
    """Sum of the ranks' votes to stop."""

    @property
    def nonfinite(self) -> bool:
        """Whether loss or gradient norm is NaN or infinite; the device then skipped the update."""
        return not (math.isfinite(self.loss) and math.isfinite(self.norm))


class Readback:
    """Holds the numbers of at most one update: `send` them, and `read` them before the next are sent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._sent: tuple[int, int, tuple[int, int]] | None = None
        on_gpu = world.device.type == "cuda"
        self._event = torch.cuda.Event() if on_gpu else None
        self._host = torch.zeros(3, dtype=torch.float64, pin_memory=on_gpu)

    def send(
        self, update: int, epoch: int, batches: tuple[int, int], loss: Tensor, norm: Tensor, vote: int
    ) -> Tensor:
        """Sum an update's numbers over the ranks and start the copy; returns, on the device, 1 to skip it, else 0."""
        device = self.world.device
        numbers = [loss.double(), norm.double().to(device), torch.full((), vote, device=device).double()]
        sums = sum_over_ranks(self.world, torch.stack(numbers))
        self._host.copy_(sums, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._sent = (update, epoch, batches)
        return (~sums.isfinite().all()).float()

    def read(self) -> UpdateReport | None:
        """The numbers sent last; None if they have been read."""
        if self._sent is None:
            return None
        if self._event is not None:
            self._event.synchronize()
        (update, epoch, batches), self._sent = self._sent, None
        loss, norm, votes = self._host.tolist()
        size = self.world.size
        return UpdateReport(update, epoch, batches, loss / size, norm / size, int(votes))
