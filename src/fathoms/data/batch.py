"""A batch, as a loader yields it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
