"""RunContext: the fixed inputs of a run. TrainState: its progress."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fathoms.train.build import Data
from fathoms.train.distributed import World
from fathoms.train.job import Job
from fathoms.train.record.run_folder import RunFolder


class RunContext(NamedTuple):
    """The constants of a run: its job, its ranks, its data and its folder."""

    job: Job
    world: World
    data: Data
    folder: RunFolder

    @property
    def batches_per_epoch(self) -> int:
        """Forward passes of one epoch on each rank."""
        return self.data.train.batches

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer updates of one epoch; the last may accumulate fewer batches."""
        return math.ceil(self.batches_per_epoch / self.job.recipe.grad_accum_steps)


@dataclass
class TrainState:
    """The counters of a run; a checkpoint keeps all of them."""

    sums: Tensor
    """Of this epoch on this rank, on the device: loss times images, top-1 hits, top-5 hits, images."""
    epoch: int = 0
    batch: int = 0
    """Batches done in this epoch."""
    updates: int = 0
    """Optimizer updates done in all epochs."""
    best: dict[str, Any] | None = None
    """The best evaluation so far, with its epoch."""
    last: dict[str, Any] | None = None
    """The last evaluation."""
    seconds: float = 0.0
    """Spent in training, without the evaluations."""
    peak_memory: int | None = None
    """Most bytes allocated on the GPU by any process of the run so far, as far as noted; None without one."""

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from the counters of a checkpoint; the sums are per rank and set apart."""
        for name in vars(self).keys() - {"sums"}:
            setattr(self, name, saved[name])

    def position(self, updates_per_epoch: int) -> float:
        """The epoch as a fraction: updates done over updates per epoch."""
        return self.epoch + (self.updates - self.epoch * updates_per_epoch) / updates_per_epoch

    def note_memory(self, device: torch.device) -> None:
        """Take this process's peak into the run's."""
        if device.type == "cuda":
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated(device))

    def add_time(self, since: float) -> float:
        """Count the seconds since a reading of the monotonic clock; its reading now."""
        now = time.monotonic()
        self.seconds += now - since
        return now

    def next_epoch(self) -> None:
        """Move to the first batch of the next epoch."""
        self.epoch, self.batch = self.epoch + 1, 0
        self.sums.zero_()
