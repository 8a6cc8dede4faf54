"""Accuracy, loss, calibration and confusion of a stream of batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.errors import ConfigError
from fathoms.parts.modes import in_inference


class Confusion(Sequence[list[int]]):
    """Images by true class (rows) and predicted class; a row is written out when it is asked for.

    Args:
        classes: Number of classes.
        counts: By true class, the predicted classes with their numbers of images.

    >>> confusion = Confusion(3, {0: {0: 5, 2: 1}})
    >>> confusion[0], confusion.images(0), confusion.pairs()
    ([5, 0, 1], 6, [[0, 0, 5], [0, 2, 1]])
    """

    def __init__(self, classes: int, counts: Mapping[int, Mapping[int, int]]) -> None:
        self.classes, self.counts = classes, counts

    def __len__(self) -> int:
        return self.classes

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        place = range(self.classes)[index]
        if isinstance(place, range):
            return [self[true] for true in place]
        row = [0] * self.classes
        for guess, count in self.predicted(place).items():
            row[guess] = count
        return row

    def predicted(self, true: int) -> Mapping[int, int]:
        """Predicted classes of the images of a class, each with its number of images."""
        return self.counts.get(true, {})

    def images(self, true: int) -> int:
        return sum(self.predicted(true).values())

    def accuracy(self, true: int) -> float | None:
        """Percent of a class's images that were classified correctly; None without images."""
        images = self.images(true)
        return 100 * self.predicted(true).get(true, 0) / images if images else None

    def pairs(self) -> list[list[int]]:
        """[true class, predicted class, images] of every pair that occurs, in order."""
        return [
            [true, guess, row[guess]] for true, row in sorted(self.counts.items()) for guess in sorted(row)
        ]


BINS = 15
"""Bins of the calibration error."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a model on one split; accuracies and the calibration error in percent."""

    images: int
    loss: float
    top1: float
    top5: float
    calibration_error: float
    per_class: tuple[float | None, ...]
    confusion: Confusion
    skipped: int
    correct: tuple[bool, ...] = ()
    """Whether each image, in the order of the split, was classified correctly; of this rank only."""
    real_top1: float | None = None
    """Percent of the images with ReaL labels whose predicted class is among them; None without such images."""

    def correct_bits(self) -> bytes:
        """`correct` as bits, eight images a byte, the first in the highest bit."""
        return np.packbits(np.array(self.correct, bool)).tobytes()

    def summary(self) -> dict[str, Any]:
        names = ("images", "loss", "top1", "top5", "calibration_error", "skipped")
        return {name: getattr(self, name) for name in names}


class Tally:
    """Running sums and the predicted classes, kept on the device; one synchronisation at the end.

    Args:
        classes: Number of classes of the labels.
        device: Where the sums are kept.
        label_map: The model's output for each class, where the data set has a subset of the classes or
            another order; the other outputs are ignored.
        real: ReaL labels: by index of an image, the classes that are right; other images do not count there.
    """

    def __init__(
        self,
        classes: int,
        device: torch.device | str = "cpu",
        label_map: Sequence[int] | None = None,
        real: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self.classes, self.real = classes, real or {}
        self.label_map = None if label_map is None else torch.tensor(label_map, device=device)
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self.bins = torch.zeros(2, BINS, dtype=torch.float64, device=device)
        # Labels and predicted classes of each batch on the device, and the images' indices.
        self.predicted: list[Tensor] = []
        self.ids: list[Tensor] = []

    def add(
        self, logits: Float[Tensor, "B C"], labels: Int[Tensor, " B"], ids: Int[Tensor, " B"] | None = None
    ) -> None:
        """Count a batch; a label of -1 marks an image that could not be read. ReaL labels need `ids`."""
        logits = logits.float()
        if self.label_map is not None:
            logits = logits[:, self.label_map]
        elif logits.shape[1] != self.classes:
            raise ConfigError(
                f"evaluate: the model has {logits.shape[1]} outputs, the data {self.classes} classes; "
                "give a model of that size, or class names that can be matched"
            )
        known = labels >= 0
        safe = labels.clamp(min=0)
        weight = known.double()
        loss = F.cross_entropy(logits, safe, reduction="none").double()
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = ranked == safe[:, None]
        first, five = hits[:, 0].double(), hits.any(dim=1).double()
        self.predicted.append(torch.stack([labels, ranked[:, 0]]))
        if ids is not None:
            self.ids.append(ids)
        self.sums += torch.stack(
            [
                weight.sum(),
                (loss * weight).sum(),
                (first * weight).sum(),
                (five * weight).sum(),
                (1 - weight).sum(),
            ]
        )
        # A model that diverged has no confidence; NaN would fall into no bin.
        confidence = logits.softmax(dim=1).amax(dim=1).double().nan_to_num(nan=0.0)
        bin_index = (confidence * BINS).long().clamp(max=BINS - 1)
        for row, values in enumerate((confidence, first)):
            self.bins[row].index_add_(0, bin_index, values * weight)

    def result(self) -> Evaluation:
        """The metrics over all ranks."""
        # A rank may have no images.
        none = torch.zeros(2, 0, dtype=torch.int64, device=self.sums.device)
        labels, guesses = torch.cat([none, *self.predicted], dim=1).cpu().numpy()
        counts = [(self._pairs(labels, guesses), self._count_real(labels, guesses))]
        if dist.is_available() and dist.is_initialized():
            for tensor in (self.sums, self.bins):
                dist.all_reduce(tensor)
            counts *= dist.get_world_size()
            dist.all_gather_object(counts, counts[0])
        images, loss, top1, top5, skipped = self.sums.tolist()
        if not images:
            raise ConfigError("evaluate: no image could be read; run `fathoms data check`")
        confusion = self._confusion([pairs for pairs, _ in counts])
        right, judged = (sum(column) for column in zip(*(real for _, real in counts), strict=True))
        confidence, correct = self.bins
        calibration = 100 * (confidence - correct).abs().sum().item() / images
        return Evaluation(
            images=int(images),
            loss=loss / images,
            top1=100 * top1 / images,
            top5=100 * top5 / images,
            calibration_error=calibration,
            per_class=tuple(map(confusion.accuracy, range(self.classes))),
            confusion=confusion,
            skipped=int(skipped),
            correct=tuple((labels == guesses).tolist()),
            real_top1=100 * right / judged if judged else None,
        )

    def _pairs(self, labels: np.ndarray, guesses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of true and predicted class that occur, each as one number, and how often."""
        known = labels >= 0
        return np.unique(labels[known] * self.classes + guesses[known], return_counts=True)

    def _confusion(self, ranks: list[tuple[np.ndarray, np.ndarray]]) -> Confusion:
        counts: dict[int, dict[int, int]] = {}
        for pairs, times in ranks:
            for pair, count in zip(pairs.tolist(), times.tolist(), strict=True):
                true, guess = divmod(pair, self.classes)
                row = counts.setdefault(true, {})
                row[guess] = row.get(guess, 0) + count
        return Confusion(self.classes, counts)

    def _count_real(self, labels: np.ndarray, guesses: np.ndarray) -> tuple[int, int]:
        """Images whose predicted class is among their ReaL labels, and images that were read and have some."""
        if not self.real or not self.ids:
            return 0, 0
        rows = zip(torch.cat(self.ids).tolist(), labels.tolist(), guesses.tolist(), strict=True)
        right = [
            guess in self.real[index] for index, label, guess in rows if label >= 0 and index in self.real
        ]
        return sum(right), len(right)


class FewerChannels(nn.Module):
    """A model that takes only the first channels of RGB images, for greyscale data."""

    def __init__(self, model: nn.Module, channels: int) -> None:
        super().__init__()
        self.model, self.channels = model, channels

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images[:, : self.channels])


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    classes: int,
    *,
    device: torch.device | str = "cpu",
    amp_dtype: torch.dtype | None = None,
    label_map: Sequence[int] | None = None,
    real: Mapping[int, Collection[int]] | None = None,
) -> Evaluation:
    """Metrics of a model over batches, in evaluation mode; the mode of each module is restored.

    Args:
        model: Images to logits.
        batches: From an evaluation loader.
        classes: Number of classes in the data.
        device: Where batches are.
        amp_dtype: Autocast dtype; None for full precision.
        label_map: See `Tally`.
        real: See `Tally`.
    """
    tally, kind = Tally(classes, device, label_map, real), torch.device(device).type
    # Autocast forgets its casts of the weights with its outermost context: this one keeps them for all batches.
    with in_inference(model), torch.autocast(kind, enabled=False):
        for batch in batches:
            with torch.autocast(kind, dtype=amp_dtype, enabled=amp_dtype is not None):
                logits = model(batch.images)
            tally.add(logits, batch.labels, batch.ids)
    return tally.result()
