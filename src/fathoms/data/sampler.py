"""Sampler: the order of every epoch, from counters alone; the batch, and the statistics of a loader.

Position p of epoch e is a pure function of (seed, e, p). A run resumes in the middle of an epoch by its two counters,
with any number of workers; ranks divide the positions of each global batch among themselves, so another number of
ranks with the same global batch sees the same samples in the same update.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from torch import Tensor

from fathoms.data.counter_rng import generator
from fathoms.data.sources.source import DataError
from fathoms.errors import ConfigError
from fathoms.registry import check_name

ORDERS = ("shuffled", "sequential")


@dataclass(frozen=True)
class Refs:
    """The samples of one batch on one rank: data set index, number of the repeat, position in the epoch."""

    index: np.ndarray
    repeat: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def part(self, start: int, stop: int) -> Refs:
        return Refs(self.index[start:stop], self.repeat[start:stop], self.position[start:stop])

    @classmethod
    def joined(cls, parts: Sequence[Refs]) -> Refs:
        names = [entry.name for entry in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class Sampler:
    """The order of a data set of `size` samples on one rank.

    A shuffled order drops the incomplete batch at the end (each epoch drops other samples). A sequential order, for
    evaluation, visits every sample exactly once over all ranks: nothing is padded or repeated.
    """

    size: int
    batch_size: int
    """Samples of a batch on one rank."""
    seed: int = 0
    order: str = "shuffled"
    aug_repeats: int = 1
    """Number of times a sample is drawn in an epoch, each with other augmentation; an epoch stays `size` long."""
    world: int = 1
    rank: int = 0
    _kept: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.order, ORDERS, "order", "order")
        if self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be at least 1")
        if self.aug_repeats < 1:
            raise ConfigError(f"--aug-repeats {self.aug_repeats}: must be at least 1")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank={self.rank}: must be from 0 to below world={self.world}")
        if self.size < 1:
            raise DataError("data: the split is empty; check the path and the split")
        if self.order == "sequential" and self.aug_repeats != 1:
            raise ConfigError(
                f"--aug-repeats {self.aug_repeats}: has no meaning for order='sequential'; leave it out"
            )
        if self.order == "shuffled" and self.size < self.global_batch:
            most = self.size // self.world
            remedy = f"use a batch size of at most {most}" if most else f"use at most {self.size} ranks"
            raise DataError(
                f"data: {self.size} samples do not fill one batch of {self.batch_size} x {self.world} ranks; "
                f"{remedy}"
            )

    def check_size(self, samples: int) -> None:
        """Refuse a source of another size."""
        if self.size != samples:
            raise ConfigError(f"data: the sampler is for {self.size} samples, the source has {samples}")

    def check_start(self, start: int) -> None:
        """Refuse to begin an epoch outside of it."""
        if not 0 <= start <= self.batches:
            raise DataError(
                f"batch {start}: is outside the epoch of {self.batches} batches; check the checkpoint"
            )

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world

    @property
    def batches(self) -> int:
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
        """This rank's places in a global batch: each with the place opposite, its partner in mixing.

        So any number of ranks mixes the same pairs, as long as a rank has an even number of samples.
        """
        half = self.rank + self.world * np.arange(self.batch_size // 2)
        middle = [self.world * (self.batch_size // 2) + self.rank] if self.batch_size % 2 else []
        return np.concatenate([half, np.array(middle, np.int64), self.global_batch - 1 - half[::-1]])

    def batch(self, epoch: int, number: int) -> Refs:
        """The samples of one batch; any batch may be asked for, in any order."""
        if not 0 <= number < self.batches:
            raise ConfigError(f"batch {number}: is outside the epoch of {self.batches} batches")
        start = number * self.global_batch
        if self.order == "sequential":
            position = start + self.rank + self.world * np.arange(self.batch_size)
            position = position[position < self.size]
            return Refs(position, np.zeros_like(position), position)
        position = start + self._share()
        # The repeats of a sample are adjacent, so with several ranks they fall on different ones.
        return Refs(
            self._permutation(epoch)[position // self.aug_repeats], position % self.aug_repeats, position
        )


@dataclass(frozen=True)
class Batch:
    """The samples of one forward pass, on the device.

    `images` are float, normalised (or uint8 where the loader has no augmentation); `labels` int64, -1 for an image
    that could not be decoded (evaluation only); `targets` soft labels where samples were mixed; `ids` the data set
    indices, on the host. `number` counts the batches of an epoch from 0, and `next_position` is the (epoch, number) to
    resume from after this batch.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    epoch: int
    number: int
    targets: Tensor | None = None

    @property
    def next_position(self) -> tuple[int, int]:
        """Counters to store with a checkpoint taken after this batch."""
        return self.epoch, self.number + 1

    def __len__(self) -> int:
        return len(self.labels)


PACK_SHARE = 0.2
"""Share of waiting from which on re-encoding a whole data set is worth its time."""


@dataclass
class LoaderStats:
    """Counts and times of one loader, over all epochs so far."""

    images: int = 0
    waited: float = 0.0
    """Seconds the consumer waited for data; with a GPU, those in which the GPU was idle."""
    elapsed: float = 0.0
    """Seconds since the first batch was requested, waiting and working."""
    bad: dict[str, str] = field(default_factory=dict)
    """Name of each bad image and the reason."""
    replaced: int = 0
    """Times a bad image was replaced (or marked, in evaluation)."""
    accidents: list[str] = field(default_factory=list)
    """Workers that died or hung and were replaced."""

    @property
    def wait_share(self) -> float:
        return self.waited / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def images_per_second(self) -> float:
        return self.images / self.elapsed if self.elapsed > 0 else 0.0

    def note_bad(self, name: str, reason: str, allowed: int) -> None:
        """Count a bad image; too many different ones stop the run, naming the first few."""
        self.replaced += 1
        self.bad.setdefault(name, reason)
        if len(self.bad) <= allowed:
            return
        listed = "; ".join(f"{n} ({r})" for n, r in list(self.bad.items())[:3])
        raise DataError(
            f"data: {len(self.bad)} bad images are more than the {allowed} allowed: {listed}; "
            "remove what `fathoms data check` names, or raise --max-bad"
        )

    def note_accident(self, what: str) -> None:
        """Keep and report that a worker was replaced."""
        self.accidents.append(what)
        warnings.warn(what, RuntimeWarning, stacklevel=2)

    def advice(self, decoder: str = "", kind: str = "", workers: int = 0, cores: int = 0) -> str:
        """One sentence on what to do when the consumer waits; empty when it does not."""
        if self.wait_share < 0.05:
            return ""
        share = f"{self.wait_share:.0%} of the time is spent waiting for data"
        if cores and workers < cores:
            return f"{share}; use more workers (--workers {cores}; now {workers})"
        if decoder in ("simplejpeg", "pillow"):
            return f"{share}; install crop decoding (pip install turbojpeg; now {decoder})"
        if self.wait_share < PACK_SHARE:
            return ""
        if kind and kind != "pack":
            return f"{share}; re-encode once with `fathoms data pack`"
        return f"{share}; decoding is the limit: pack with --short-side 256, or use more CPU cores"
