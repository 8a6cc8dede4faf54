"""Which sample stands where: the order of every epoch, from counters alone.

Position p of epoch e is a pure function of (seed, e, p). A run resumes in the middle of an epoch by
its two counters; workers do not enter; ranks share out the positions of each global batch, so another
number of ranks with the same global batch sees the same samples in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from fathoms.data.counter_rng import generator
from fathoms.data.errors import DataError
from fathoms.errors import ConfigError
from fathoms.registry import check_name

ORDERS = ("shuffled", "sequential")


@dataclass(frozen=True)
class Refs:
    """The samples of one batch of one rank: data set index, number of the repeat, position."""

    index: np.ndarray
    repeat: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def part(self, start: int, stop: int) -> Refs:
        """Samples start to stop."""
        return Refs(self.index[start:stop], self.repeat[start:stop], self.position[start:stop])

    @classmethod
    def joined(cls, parts: Sequence[Refs]) -> Refs:
        """The samples of all `parts`, one after another."""
        names = [entry.name for entry in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class Plan:
    """The order of a data set of `size` samples for one rank.

    Shuffled plans drop the incomplete batch at the end (each epoch drops other samples). Sequential
    plans, for evaluation, visit every sample exactly once over all ranks: nothing is padded or repeated.
    """

    size: int
    batch_size: int
    """Samples per step on one rank."""
    seed: int = 0
    order: str = "shuffled"
    repeats: int = 1
    """Times a sample is used in an epoch, each with its own augmentation; an epoch stays `size` long."""
    world: int = 1
    rank: int = 0
    _kept: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.order, ORDERS, "order", "data.order")
        if self.batch_size < 1 or self.repeats < 1 or self.world < 1 or not 0 <= self.rank < self.world:
            raise ConfigError(
                f"data: batch_size={self.batch_size}, repeats={self.repeats}, world={self.world} must be at "
                f"least 1 and rank={self.rank} below world"
            )
        if self.size < 1:
            raise DataError("data: the split is empty; check the path and the split")
        if self.order == "sequential" and self.repeats != 1:
            raise ConfigError(
                f"data: repeats={self.repeats} has no meaning for order='sequential'; leave it out"
            )
        if self.order == "shuffled" and self.size < self.global_batch:
            raise DataError(
                f"data: {self.size} samples do not fill one step of {self.batch_size} x {self.world} ranks; "
                f"use a batch size of at most {max(1, self.size // self.world)}"
            )

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.batch_size * self.world

    @property
    def steps(self) -> int:
        """Steps of one epoch on this rank."""
        if self.order == "shuffled":
            return self.size // self.global_batch
        mine = len(range(self.rank, self.size, self.world))
        return -(-mine // self.batch_size)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._kept:
            # Only the epoch in use is kept: a million numbers take 8 MB.
            self._kept.clear()
            self._kept[epoch] = generator(self.seed, epoch, "order").permutation(self.size)
        return self._kept[epoch]

    def _share(self) -> np.ndarray:
        """Places of this rank in a global batch: each with its mirror image, which is its partner in mixing.

        So any number of ranks mixes the same pairs, as long as a rank has an even number of samples.
        """
        half = self.rank + self.world * np.arange(self.batch_size // 2)
        middle = [self.world * (self.batch_size // 2) + self.rank] if self.batch_size % 2 else []
        return np.concatenate([half, np.array(middle, np.int64), self.global_batch - 1 - half[::-1]])

    def batch(self, epoch: int, step: int) -> Refs:
        """The samples of one step; any step may be asked for, in any order."""
        if not 0 <= step < self.steps:
            raise ConfigError(f"data: step {step} is outside the epoch of {self.steps} steps")
        start = step * self.global_batch
        if self.order == "sequential":
            position = start + self.rank + self.world * np.arange(self.batch_size)
            position = position[position < self.size]
            return Refs(position, np.zeros_like(position), position)
        position = start + self._share()
        # Repeats stand side by side, so with several ranks they fall on different ones.
        return Refs(self._permutation(epoch)[position // self.repeats], position % self.repeats, position)
