"""The confusion matrix, kept as the pairs of classes that occur: of 20,000 classes the whole has 400 million cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload


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
        """Images of a class."""
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
