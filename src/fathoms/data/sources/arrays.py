"""Small data sets as arrays: .npz, IDX (MNIST's format, plain or .gz) and CIFAR's binary version.

Nothing is unpickled: CIFAR's Python version, which is a pickle, is refused with a hint at the binary one.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import UInt8

from fathoms.config_checks import MAX_TEXT
from fathoms.data.errors import DataError
from fathoms.errors import reason
from fathoms.untrusted_files import MAX_CLASSES, check_names, read_names, read_plain

# An IDX or CIFAR file is unpacked into memory; this bounds what an untrusted .gz can take.
MAX_BYTES = 8 << 30

# A small archive may unpack to this much, or to this many times its size: pixels never pack much better.
_SMALL = 1 << 28
MAX_RATIO = 200

_ARRAY_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation", "test"), "test": ("test",)}
_IDX_PREFIX = {"train": "train", "val": "t10k", "test": "t10k", "t10k": "t10k"}


class ArraySource:
    """One split as uint8 pixels (N, H, W, 3) and labels; small enough to live on the device."""

    def __init__(
        self,
        kind: str,
        split: str,
        images: UInt8[np.ndarray, "N H W 3"],
        labels: np.ndarray,
        classes: Sequence[str],
    ) -> None:
        if len(images) != len(labels) or not len(images):
            raise DataError(
                f"{kind}: {len(images)} images for {len(labels)} labels; the files do not belong together"
            )
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise DataError(
                f"{kind}: labels are {labels.dtype} of shape {labels.shape}; whole numbers are expected"
            )
        labels = labels.astype(np.int64)
        classes = check_names(list(classes), f"{kind}: classes", DataError)
        if labels.min() < 0 or labels.max() >= len(classes):
            raise DataError(
                f"{kind}: labels run to {labels.max()} for {len(classes)} classes; check the files"
            )
        self.kind, self.split = kind, split
        self.images, self.labels, self.classes = images, labels, classes
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.images)

    def where(self, index: int) -> str:
        """SPLIT[INDEX]."""
        return f"{self.split}[{index}]"

    def fingerprint(self) -> str:
        """Hash of all pixels, labels and class names, computed once."""
        if self._fingerprint is None:
            digest = hashlib.sha256(np.ascontiguousarray(self.images).data)
            digest.update(self.labels.tobytes())
            digest.update("\n".join(self.classes).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def as_rgb(images: np.ndarray, where: str) -> UInt8[np.ndarray, "N H W 3"]:
    """Convert (N,H,W), (N,H,W,1), (N,H,W,3) or (N,3,H,W) uint8 pixels to (N,H,W,3)."""
    if images.dtype != np.uint8:
        raise DataError(
            f"{where}: images are {images.dtype}, not uint8; scale them to 0..255 and store uint8"
        )
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim == 4 and images.shape[1] == 3 and images.shape[3] != 3:
        images = images.transpose(0, 2, 3, 1)
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        raise DataError(f"{where}: images have shape {images.shape}; (N, H, W) or (N, H, W, 3) is expected")
    return np.ascontiguousarray(np.broadcast_to(images, (*images.shape[:3], 3)))


def open_npz(path: str | Path, split: str = "train") -> ArraySource:
    """Open arrays `x_train`, `y_train`, `x_test` (or `x_val`), … and, if there, `classes`, from one .npz."""
    try:
        # numpy leaves a file open that it opened itself and could not read.
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            _check_unpacked(file, Path(path).stat().st_size)
            have = [name[2:] for name in archive.files if name.startswith("x_")]
            names = _ARRAY_SPLITS.get(split, (split,))
            found = next((name for name in names if name in have), None)
            if found is None or f"y_{found}" not in archive.files:
                raise DataError(
                    f"{path}: no x_{names[0]} with y_{names[0]}; it has {', '.join(archive.files)}"
                )
            images, labels = archive[f"x_{found}"], archive[f"y_{found}"]
            top = max(_largest(archive[name], name) for name in archive.files if name.startswith("y_"))
            classes = [str(name) for name in archive["classes"]] if "classes" in archive.files else None
    except DataError:
        raise
    # numpy reads an array's header as Python source: a damaged one raises anything from TokenError to SystemError.
    except Exception as error:
        raise DataError(f"{path}: not a plain .npz ({reason(error)}); save it again") from error
    names_or_numbers = classes or [str(i) for i in range(top + 1)]
    return ArraySource("npz", found, as_rgb(images, str(path)), labels.reshape(-1), names_or_numbers)


def npz_splits(path: str | Path) -> list[str]:
    """Splits with images and labels in an .npz, training first; arrays are listed, not read."""
    try:
        with Path(path).open("rb") as file, zipfile.ZipFile(file) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile):
        # Opening it gives the reason.
        return []
    found = []
    for split in ("train", "val", "test", "all"):
        known = (name for name in _ARRAY_SPLITS.get(split, (split,)) if {f"x_{name}", f"y_{name}"} <= names)
        found += [name for name in [next(known, None)] if name is not None and name not in found]
    return found


def _check_unpacked(file: BinaryIO, packed: int) -> None:
    """Refuse an archive of arrays that would unpack to more than memory should hold."""
    with zipfile.ZipFile(file) as archive:
        unpacked = 0
        for entry in archive.infolist():
            with archive.open(entry) as member:
                version = np.lib.format.read_magic(member)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read(member, max_header_size=MAX_TEXT)
            # The array's header decides how much numpy allocates; the size in the archive is not trusted.
            unpacked += max(math.prod(shape) * dtype.itemsize, entry.file_size)
    if unpacked > min(MAX_BYTES, max(_SMALL, MAX_RATIO * packed)):
        raise ValueError(f"{packed} bytes would unpack to {unpacked}")


def _largest(labels: np.ndarray, name: str) -> int:
    if (
        labels.dtype.kind not in "iu"
        or not labels.size
        or not 0 <= labels.min() <= labels.max() < MAX_CLASSES
    ):
        raise ValueError(f"{name} does not hold labels from 0 to {MAX_CLASSES - 1}")
    return int(labels.max())


def _read_bounded(path: Path) -> bytes:
    if path.suffix != ".gz":
        return read_plain(path, MAX_BYTES)
    most = min(MAX_BYTES, max(_SMALL, MAX_RATIO * path.stat().st_size))
    try:
        with gzip.open(path) as file:
            data = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file; fetch it again") from error
    if len(data) > most:
        raise DataError(
            f"{path}: unpacks to more than {most >> 20} MiB, so it is not an IDX file; fetch it again"
        )
    return data


def read_idx(path: str | Path) -> np.ndarray:
    """Read one IDX file of bytes, plain or gzipped."""
    data = _read_bounded(Path(path))
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or not 1 <= data[3] <= 4:
        raise DataError(f"{path}: not an IDX file of unsigned bytes; fetch it again")
    dims = data[3]
    if len(data) < 4 + 4 * dims:
        raise DataError(f"{path}: ends inside its header; fetch it again")
    shape = struct.unpack_from(f">{dims}I", data, 4)
    count = 1
    for length in shape:
        count *= length
    if len(data) != 4 + 4 * dims + count:
        raise DataError(f"{path}: {len(data)} bytes do not hold {shape} values; fetch it again")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


def open_idx(folder: str | Path, split: str = "train") -> ArraySource:
    """Open MNIST's four files (train-… and t10k-…), plain or .gz, in one folder."""
    prefix = _IDX_PREFIX.get(split)
    if prefix is None:
        raise DataError(f"{folder}: IDX has no split {split!r}; use train or val")
    images, labels = (
        _find(Path(folder), f"{prefix}-{part}-ubyte") for part in ("images-idx3", "labels-idx1")
    )
    values = read_idx(labels)
    numbers = read_idx(_find(Path(folder), "train-labels-idx1-ubyte"))
    classes = [str(i) for i in range(int(max(values.max(initial=0), numbers.max(initial=0))) + 1)]
    return ArraySource("idx", prefix, as_rgb(read_idx(images), str(images)), values.reshape(-1), classes)


def _find(folder: Path, name: str) -> Path:
    for candidate in (name, f"{name}.gz", name.replace("-idx", ".idx"), f"{name.replace('-idx', '.idx')}.gz"):
        if (folder / candidate).is_file():
            return folder / candidate
    raise DataError(f"{folder}: {name}(.gz) is missing; put the four IDX files there")


def open_cifar(folder: str | Path, split: str = "train") -> ArraySource:
    """Open CIFAR-10 or CIFAR-100 in the binary version: *.bin and the list of class names."""
    folder = Path(folder)
    hundred = (folder / "train.bin").is_file()
    names = {"train": ["train.bin"] if hundred else [f"data_batch_{i}.bin" for i in range(1, 6)]}
    names["val"] = names["test"] = ["test.bin"] if hundred else ["test_batch.bin"]
    if split not in names:
        raise DataError(f"{folder}: CIFAR has no split {split!r}; use train or val")
    listing = folder / ("fine_label_names.txt" if hundred else "batches.meta.txt")
    record, skip = (3074, 2) if hundred else (3073, 1)
    parts = []
    for name in [*names[split], listing.name]:
        if not (folder / name).is_file():
            raise DataError(
                f"{folder}: {name} is missing; get CIFAR's 'binary version' (the Python one is a pickle)"
            )
    for name in names[split]:
        data = np.frombuffer(read_plain(folder / name, MAX_BYTES), np.uint8)
        if not len(data) or len(data) % record:
            raise DataError(
                f"{folder / name}: {len(data)} bytes are not a whole number of records; fetch it again"
            )
        parts.append(data.reshape(-1, record))
    rows = np.concatenate(parts)
    images = rows[:, skip:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    classes = read_names(listing, DataError)
    kind = "cifar100" if hundred else "cifar10"
    # One set of held-out images under two names: it is reported under one, or it would be listed as two splits.
    found = "train" if split == "train" else "test"
    return ArraySource(kind, found, np.ascontiguousarray(images), rows[:, skip - 1], classes)
