"""CIFAR-10 and CIFAR-100 in the binary version: *.bin and the list of class names.

The Python version is a pickle; it is refused with a hint at the binary one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fathoms.data.errors import DataError
from fathoms.data.sources.arrays import MAX_BYTES, ArraySource
from fathoms.data.sources.left_out import beside
from fathoms.files.untrusted import read_names, read_plain

_TEN = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_HUNDRED = {"train": ["train.bin"], "test": ["test.bin"]}
_LISTS = ("batches.meta.txt", "fine_label_names.txt")


def is_cifar(folder: Path) -> bool:
    """Whether a folder holds a file of CIFAR, in either version."""
    binary = [*_TEN["train"], *_TEN["test"], _LISTS[1]]
    pickled = ["data_batch_1", "batches.meta"]
    return any((folder / name).is_file() for name in (*binary, *pickled))


def cifar_splits(folder: str | Path) -> list[str]:
    """The splits of which a file is in the folder, training first."""
    files = _files(Path(folder))
    return [split for split, names in files.items() if any((Path(folder) / n).is_file() for n in names)]


def open_cifar(folder: str | Path, split: str = "train") -> ArraySource:
    """Open one split; `val` is the test file, for want of another."""
    folder = Path(folder)
    # One set of held-out images under two names: it is reported under one, or it would be listed as two splits.
    found = "test" if split == "val" else split
    files = _files(folder)
    if found not in files:
        raise DataError(f"{folder}: CIFAR has no split {split!r}; use train or test")
    hundred = files is _HUNDRED
    listing = folder / _LISTS[hundred]
    for name in [*files[found], listing.name]:
        if not (folder / name).is_file():
            raise DataError(
                f"{folder}: {name} is missing; get CIFAR's 'binary version' (the Python one is a pickle)"
            )
    classes = read_names(listing, DataError)
    record, skip = (3074, 2) if hundred else (3073, 1)
    parts = [_read(folder / name, record, skip, len(classes)) for name in files[found]]
    rows = np.concatenate(parts)
    images = rows[:, skip:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    kind, labels = "cifar100" if hundred else "cifar10", rows[:, skip - 1]
    taken = {*_LISTS, *(name for names in files.values() for name in names)}
    left = beside(folder, taken) if found == cifar_splits(folder)[0] else None
    return ArraySource(kind, found, np.ascontiguousarray(images), labels, classes, str(folder), left)


def _files(folder: Path) -> dict[str, list[str]]:
    return _HUNDRED if (folder / "train.bin").is_file() or (folder / _LISTS[1]).is_file() else _TEN


def _read(path: Path, record: int, skip: int, classes: int) -> np.ndarray:
    """The records of one file: labels, then planes of pixels."""
    size = path.stat().st_size
    if not size or size % record:
        raise DataError(f"{path}: {size} bytes are not a whole number of records; fetch it again")
    rows = np.frombuffer(read_plain(path, MAX_BYTES), np.uint8).reshape(-1, record)
    top = int(rows[:, skip - 1].max())
    if top >= classes:
        raise DataError(f"{path}: labels run to {top} for {classes} classes; fetch it again")
    return rows
