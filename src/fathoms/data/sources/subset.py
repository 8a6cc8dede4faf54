"""Part of a source: the samples at given indices, under their own names."""

from __future__ import annotations

import hashlib

import numpy as np

from fathoms.data.sources.arrays import ArraySource
from fathoms.data.sources.base import Source
from fathoms.data.sources.fingerprint import earlier_fingerprint


class SourceSubset:
    """Samples of a file-backed source, in the order of `indices`.

    Args:
        source: The whole split.
        indices: Which of its samples.
        split: The role that they play.
    """

    def __init__(self, source: Source, indices: np.ndarray, split: str) -> None:
        self.source, self.indices, self.split = source, indices, split
        self.kind, self.classes, self.labels = source.kind, source.classes, source.labels[indices]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.indices)

    def read(self, index: int) -> bytes:
        """The encoded bytes of one image."""
        return self.source.read(int(self.indices[index]))

    def where(self, index: int) -> str:
        """Name of one image, for error messages."""
        return self.source.where(int(self.indices[index]))

    def size(self, index: int) -> int:
        """Bytes of one encoded image."""
        return self.source.size(int(self.indices[index]))

    def fingerprint(self) -> str:
        """Hash of the whole source and of the indices."""
        return _fingerprint(self.source.fingerprint(), self.indices)

    def earlier_fingerprint(self) -> str:
        """The same with the fingerprint of the whole that earlier versions stored."""
        return _fingerprint(earlier_fingerprint(self.source), self.indices)


class ArraySubset(ArraySource):
    """Samples of arrays, in the order of `indices`; see `SourceSubset`."""

    def __init__(self, source: ArraySource, indices: np.ndarray, split: str) -> None:
        super().__init__(source.kind, split, source.images[indices], source.labels[indices], source.classes)
        self.source, self.indices = source, indices

    def where(self, index: int) -> str:
        """SPLIT[INDEX] of the whole source."""
        return self.source.where(int(self.indices[index]))

    def fingerprint(self) -> str:
        """Hash of the whole source and of the indices."""
        return _fingerprint(self.source.fingerprint(), self.indices)


def _fingerprint(whole: str, indices: np.ndarray) -> str:
    return hashlib.sha256(whole.encode() + indices.astype("<i8").tobytes()).hexdigest()


def subset(source: Source | ArraySource, indices: np.ndarray, split: str) -> SourceSubset | ArraySubset:
    """The samples of a source at `indices`, as a source that plays the role `split`."""
    if isinstance(source, ArraySource):
        return ArraySubset(source, indices, split)
    return SourceSubset(source, indices, split)


def stratified(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of what stays and of a share that is taken out, the same share of every class; both ascending.

    A class keeps at least one sample, and gives one as soon as it has two.
    """
    rng = np.random.default_rng(seed)
    taken: list[np.ndarray] = []
    for label in np.unique(labels):
        own = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(share * len(own))), len(own) - 1)
        taken.append(own[:count])
    out = np.sort(np.concatenate(taken))
    return np.setdiff1d(np.arange(len(labels)), out), out
