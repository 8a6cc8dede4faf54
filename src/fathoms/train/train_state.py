"""How far a run has come."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass
class Course:
    """What a run counts; a checkpoint keeps all of it."""

    sums: Tensor
    """Of this epoch on this rank, on the device: loss times images, right, right among five, images."""
    epoch: int = 0
    step: int = 0
    """Batches of this epoch."""
    updates: int = 0
    """Of all epochs."""
    best: dict[str, Any] | None = None
    """The best evaluation so far, with its epoch."""
    last: dict[str, Any] | None = None
    """The last evaluation."""
    seconds: float = 0.0
    """Of training, without the evaluations."""

    def counts(self) -> dict[str, Any]:
        """All but the sums, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sums"}

    def take(self, state: dict[str, Any]) -> None:
        """Go to where a checkpoint was."""
        for name in self.counts():
            setattr(self, name, state[name])

    def position(self, updates_per_epoch: int) -> float:
        """The epoch as a fraction: updates done over updates an epoch."""
        return self.epoch + (self.updates - self.epoch * updates_per_epoch) / updates_per_epoch

    def spend(self, since: float) -> float:
        """Count the time since then; the time now, of the same monotonic clock."""
        now = time.monotonic()
        self.seconds += now - since
        return now

    def next_epoch(self) -> None:
        """Go to the first step of the next epoch."""
        self.epoch, self.step = self.epoch + 1, 0
        self.sums.zero_()
