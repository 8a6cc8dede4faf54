"""Data sets in formats of others: IDX (MNIST), CIFAR in its binary version, Hugging Face.

IDX is four files (train-… and t10k-…), plain or .gz, in one folder. CIFAR is *.bin and the list of class names; its
Python version is a pickle, and refused. Of a Hugging Face data set the encoded bytes come straight from Arrow, not
decoded by it.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fathoms.data.sources.arrays import MAX_BYTES, SMALL, ArraySource, as_rgb
from fathoms.data.sources.source import (
    MAX_FILE,
    SPLIT_NAMES,
    BadImageError,
    DataError,
    LeftOut,
    beside,
    digest_lines,
    pick_split,
)
from fathoms.errors import reason
from fathoms.machine import hub_or_cache
from fathoms.untrusted import MAX_CLASSES, check_names, read_names, read_plain

# MNIST packs to a fifth; zeros pack to a thousandth.
MAX_RATIO = 64
_PREFIX = {"train": "train", "val": "t10k", "test": "t10k", "t10k": "t10k"}
_PARTS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def idx_splits(folder: str | Path) -> list[str]:
    """The splits of which a file is in the folder, training first."""
    return [p for p in ("train", "t10k") if any(_candidates(Path(folder), f"{p}-{part}") for part in _PARTS)]


def open_idx(folder: str | Path, split: str = "train") -> ArraySource:
    """Open one split: its images and its labels."""
    prefix = _PREFIX.get(split)
    if prefix is None:
        raise DataError(f"{folder}: IDX has no split {split!r}; use train or val")
    images, labels = (_find(Path(folder), f"{prefix}-{part}") for part in _PARTS)
    values = read_idx(labels)
    numbers = values if prefix == "train" else read_idx(_find(Path(folder), f"train-{_PARTS[1]}"))
    classes = [str(i) for i in range(int(max(values.max(initial=0), numbers.max(initial=0))) + 1)]
    pixels = as_rgb(read_idx(images), str(images))
    return ArraySource(
        "idx", prefix, pixels, values.reshape(-1), classes, str(images), _beside(Path(folder), prefix)
    )


def read_idx(path: Path) -> np.ndarray:
    """Read one IDX file of bytes, plain or gzipped; only what its header declares is unpacked."""
    packed = path.stat().st_size
    most = min(MAX_BYTES, max(SMALL, MAX_RATIO * packed) if path.suffix == ".gz" else packed)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(4)
            if len(start) < 4 or start[:3] != b"\x00\x00\x08" or not 1 <= start[3] <= 4:
                raise ValueError("not an IDX file of unsigned bytes")
            shape = struct.unpack(f">{start[3]}I", file.read(4 * start[3]))
            count = math.prod(shape)
            data = file.read(count) if count <= most else b""
            if len(data) < count:
                raise ValueError(f"its {packed} bytes do not hold {shape} values")
            if file.read(1):
                raise ValueError(f"holds more than the declared {shape} values")
    except (OSError, EOFError, ValueError, zlib.error, struct.error) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); fetch it again") from error
    return np.frombuffer(data, np.uint8).reshape(shape)


def _candidates(folder: Path, name: str) -> list[Path]:
    dotted = name.replace("-idx", ".idx")
    return [p for n in (name, f"{name}.gz", dotted, f"{dotted}.gz") if (p := folder / n).is_file()]


def _find(folder: Path, name: str) -> Path:
    found = _candidates(folder, name)
    if not found:
        raise DataError(f"{folder}: {name}(.gz) is missing; put the four IDX files there")
    return found[0]


def _beside(folder: Path, prefix: str) -> LeftOut:
    if prefix != idx_splits(folder)[0]:
        return LeftOut()
    names = (f"{prefix}-{part}" for prefix in ("train", "t10k") for part in _PARTS)
    return beside(folder, {found[0].name for name in names if (found := _candidates(folder, name))})


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
    rows = np.concatenate([_records(folder / name, record) for name in files[found]])
    images = rows[:, skip:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    kind, labels = "cifar100" if hundred else "cifar10", rows[:, skip - 1]
    taken = {*_LISTS, *(name for names in files.values() for name in names)}
    left = beside(folder, taken) if found == cifar_splits(folder)[0] else None
    return ArraySource(kind, found, np.ascontiguousarray(images), labels, classes, str(folder), left)


def _files(folder: Path) -> dict[str, list[str]]:
    return _HUNDRED if (folder / "train.bin").is_file() or (folder / _LISTS[1]).is_file() else _TEN


def _records(path: Path, size: int) -> np.ndarray:
    """The records of one file: labels, then planes of pixels."""
    values = np.frombuffer(read_plain(path, MAX_BYTES), np.uint8)
    if not len(values) or len(values) % size:
        raise DataError(f"{path}: {len(values)} bytes are not a whole number of records; fetch it again")
    return values.reshape(-1, size)


PREFIX = "hfds/"


class HubSource:
    """One split of a `datasets.Dataset` with an image column and a label column."""

    kind = "hub"

    def __init__(self, dataset: Any, split: str, image_key: str = "image", label_key: str = "label") -> None:
        import datasets

        for key in (image_key, label_key):
            if key not in dataset.column_names:
                raise DataError(f"hub: no column {key!r}; it has {', '.join(dataset.column_names)}")
        self.split, self.left_out = split, LeftOut()
        labels = np.asarray(dataset.with_format("numpy")[label_key][:])
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or not labels.size:
            raise DataError(f"hub: column {label_key!r} does not hold labels; whole numbers are expected")
        self.labels = labels.astype(np.int64)
        named, top = getattr(dataset.features[label_key], "names", None), int(self.labels.max())
        if self.labels.min() < 0 or top >= (len(named) if named else MAX_CLASSES):
            raise DataError(f"hub: labels of column {label_key!r} run to {top}; number the classes from 0")
        self.classes = check_names(list(named or map(str, range(top + 1))), "hub", DataError)
        # decode=False gives the stored bytes, so that the crop can be chosen before decoding.
        self._dataset = dataset.cast_column(image_key, datasets.Image(decode=False))
        self._key = image_key

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> bytes:
        value = self._dataset[int(index)][self._key] or {}
        if value.get("bytes"):
            return value["bytes"]
        if not value.get("path"):
            raise BadImageError("the row holds no image")
        return read_plain(value["path"], MAX_FILE)

    def where(self, index: int) -> str:
        return f"{self.split}[{index}]"

    def size(self, index: int) -> int:
        """The size of the stored bytes; 0 of a row without an image, which `read` then refuses."""
        try:
            return len(self.read(index))
        except (BadImageError, OSError):
            return 0

    def fingerprint(self) -> str:
        """Hash of the table as kept by `datasets`, with the labels."""
        return digest_lines([str(self._dataset._fingerprint), *self.classes, self.labels.tobytes().hex()])


def _from_hub(datasets: Any, name: str) -> Any:
    """A data set of the Hub; from the cache only, and at once, where the Hub is out of reach."""
    with hub_or_cache() as online:
        try:
            return datasets.load_dataset(name)
        except Exception as error:
            if online:
                raise
            raise DataError(
                f"{PREFIX}{name}: the Hub cannot be reached, and the local cache does not hold it; "
                "check the network, or give a folder"
            ) from error


def hub_splits(path: str) -> list[str]:
    """The splits of a data set, training first; those under other names are counted by the reader."""
    return _known(_load(path))


def _known(loaded: Any) -> list[str]:
    return [name for names in SPLIT_NAMES.values() for name in names if name in loaded]


def _load(path: str) -> Any:
    """The splits by name; a data set without splits is "all"."""
    try:
        import datasets
    except ImportError as error:
        raise DataError("hub: the package 'datasets' is missing; pip install 'fathoms[data]'") from error
    try:
        if path.startswith(PREFIX):
            # Data sets that need their own Python code are not loaded: no untrusted code is run.
            loaded = _from_hub(datasets, path.removeprefix(PREFIX))
        else:
            loaded = datasets.load_from_disk(path)
    except DataError:
        raise
    # Arrow, its JSON and the network raise errors of a dozen packages.
    except Exception as error:
        raise DataError(
            f"{path}: not a readable data set ({reason(error)}); save or fetch it again"
        ) from error
    return {"all": loaded} if isinstance(loaded, datasets.Dataset) else loaded


def open_hub(path: str, split: str = "train") -> HubSource:
    """A data set saved with `save_to_disk`, or `hfds/NAME` from the hub's cache or the network."""
    loaded = _load(path)
    import datasets

    found = pick_split(split, [str(name) for name in loaded], path)
    dataset = loaded[found]
    image_key = next((k for k, f in dataset.features.items() if isinstance(f, datasets.Image)), "image")
    label_key = next((k for k, f in dataset.features.items() if isinstance(f, datasets.ClassLabel)), "label")
    source = HubSource(dataset, found, image_key, label_key)
    known = _known(loaded)
    if [found] == known[:1]:
        for name in sorted(set(map(str, loaded)) - set(known)):
            source.left_out.add("split of another name", name)
    return source
