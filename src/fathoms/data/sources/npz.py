"""Arrays in one .npz: `x_train`, `y_train`, `x_test` (or `x_val`), … and, if there, `classes`. Nothing is unpickled."""

from __future__ import annotations

import math
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fathoms.data.errors import DataError
from fathoms.data.sources.arrays import MAX_BYTES, SMALL, ArraySource, as_rgb
from fathoms.data.sources.left_out import LeftOut
from fathoms.errors import reason
from fathoms.files.untrusted import MAX_CLASSES
from fathoms.names.config_checks import MAX_TEXT

# The bit of a zip file's entry that says so.
ENCRYPTED = 1
# Pixels never pack much better than this.
MAX_RATIO = 200

_SPLITS = ("train", "val", "valid", "validation", "test", "all")
_NAMES = {"train": ("train",), "val": ("val", "valid", "validation", "test"), "test": ("test",)}


def npz_splits(path: str | Path) -> list[str]:
    """The splits whose images or labels are in an .npz, training first."""
    with _opened(path) as archive:
        files = _names(archive)
        return [name for name in _SPLITS if {f"x_{name}", f"y_{name}"} & set(files)]


def open_npz(path: str | Path, split: str = "train") -> ArraySource:
    """Open one split of an .npz."""
    names = _NAMES.get(split, (split,))
    with _opened(path) as archive:
        files = _names(archive)
        found = next((name for name in names if {f"x_{name}", f"y_{name}"} & set(files)), None)
        if found is None or not {f"x_{found}", f"y_{found}"} <= set(files):
            _refuse(path, found or names[0], files)
        images = as_rgb(_array(archive, f"x_{found}"), f"{path}: x_{found}")
        labels = {
            name: _labels(_array(archive, f"y_{name}"), f"{path}: y_{name}")
            for name in _SPLITS
            if f"y_{name}" in files
        }
        named = _class_names(_array(archive, "classes"), path) if "classes" in files else None
    classes = named or [str(i) for i in range(1 + max(int(own.max()) for own in labels.values()))]
    taken = {"classes"} | {f"{part}_{name}" for part in "xy" for name in _SPLITS}
    left = LeftOut()
    if found == next(name for name in _SPLITS if f"x_{name}" in files):
        for name in sorted(set(files) - taken):
            left.add("array", name)
    return ArraySource("npz", str(found), images, labels[str(found)], classes, str(path), left)


def _refuse(path: str | Path, split: str, files: list[str]) -> NoReturn:
    if f"x_{split}" in files:
        raise DataError(f"{path}: x_{split} has no labels; add y_{split} or remove x_{split}")
    listed = ", ".join(files) or "no arrays"
    raise DataError(f"{path}: no x_{split} with y_{split}; it has {listed}; rename the arrays")


@contextmanager
def _opened(path: str | Path) -> Iterator[zipfile.ZipFile]:
    """The archive, after a look at the headers of its arrays; whatever is wrong with it is a `DataError`."""
    try:
        with Path(path).open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise DataError(f"{path}: not a plain .npz (not a zip file); save it with numpy.savez")
            with zipfile.ZipFile(file) as archive:
                _check_headers(archive, path)
                yield archive
    except DataError:
        raise
    # numpy reads an array's header as Python source: a damaged one raises anything from TokenError to SystemError.
    except Exception as error:
        raise DataError(f"{path}: not a plain .npz ({reason(error)}); save it again") from error


def _names(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in archive.namelist()]


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array whose header has been checked.

    It is unpacked in one call, without the interpreter's lock; numpy takes the lock for every 256 KiB, which is long
    where another thread imports modules.
    """
    with archive.open(_entry(archive, name)) as member:
        shape, by_columns, dtype = _header(member)
        content = member.read(math.prod(shape) * dtype.itemsize)
    return np.ndarray(shape, dtype, content, order="F" if by_columns else "C")


def _entry(archive: zipfile.ZipFile, name: str) -> str:
    return name if name in archive.namelist() else f"{name}.npy"


def _header(member: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether columns come first, and dtype of the array that follows."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(member, max_header_size=MAX_TEXT)


def _check_headers(archive: zipfile.ZipFile, path: str | Path) -> None:
    """Refuse Python objects, and an archive that would unpack to more than memory should hold."""
    packed = Path(path).stat().st_size
    unpacked = 0
    if twice := sorted(name for name, count in Counter(_names(archive)).items() if count > 1):
        raise DataError(f"{path}: holds two arrays called {twice[0]}; keep one of them")
    for entry in archive.infolist():
        name = entry.filename.removesuffix(".npy")
        if entry.flag_bits & ENCRYPTED:
            raise DataError(f"{path}: {name} is encrypted; save it without a password")
        with archive.open(entry) as member:
            shape, _, dtype = _header(member)
        if dtype.hasobject:
            raise DataError(
                f"{path}: not a plain .npz ({name} holds Python objects, which could run code); "
                "store pixels as uint8, labels as whole numbers and names as text"
            )
        # The array's header decides how much is allocated; the size in the archive is not trusted.
        unpacked += max(math.prod(shape) * dtype.itemsize, entry.file_size)
    if unpacked > min(MAX_BYTES, max(SMALL, MAX_RATIO * packed)):
        raise ValueError(f"{packed} bytes would unpack to {unpacked}")


def _class_names(values: np.ndarray, path: str | Path) -> list[str]:
    if values.ndim != 1:
        raise DataError(f"{path}: classes has shape {values.shape}; store one row of names")
    return [str(name) for name in values]


def _labels(values: np.ndarray, where: str) -> np.ndarray:
    """Class numbers, as one row; anything else is refused with its cause."""
    if values.ndim == 2 and values.shape[1] > 1:
        raise DataError(
            f"{where} has shape {values.shape}, one column for each class; store class numbers (y.argmax(1))"
        )
    if not values.size:
        raise DataError(f"{where} is empty; store a class number for each image")
    if values.dtype.kind not in "iu":
        raise DataError(f"{where} is {values.dtype}; store whole numbers (y.astype('int64'))")
    if values.min() < 0 or values.max() >= MAX_CLASSES:
        odd = values.min() if values.min() < 0 else values.max()
        raise DataError(f"{where} holds {odd}; number the classes from 0 to at most {MAX_CLASSES - 1}")
    return values.reshape(-1)
