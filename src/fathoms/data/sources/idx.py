"""IDX, MNIST's format: four files (train-… and t10k-…), plain or .gz, in one folder."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fathoms.data.errors import DataError
from fathoms.data.sources.arrays import MAX_BYTES, SMALL, ArraySource, as_rgb
from fathoms.data.sources.left_out import LeftOut, beside
from fathoms.errors import reason

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
    # The headers are compared first: a bomb declares what it unpacks to.
    counts = [read_shape(path)[0] for path in (images, labels)]
    if counts[0] != counts[1]:
        raise DataError(
            f"{images}: {counts[0]} images for {counts[1]} labels in {labels.name}; fetch both again"
        )
    values = read_idx(labels)
    numbers = values if prefix == "train" else read_idx(_find(Path(folder), f"train-{_PARTS[1]}"))
    classes = [str(i) for i in range(int(max(values.max(initial=0), numbers.max(initial=0))) + 1)]
    pixels = as_rgb(read_idx(images), str(images))
    return ArraySource(
        "idx", prefix, pixels, values.reshape(-1), classes, str(images), _beside(Path(folder), prefix)
    )


def read_shape(path: str | Path) -> tuple[int, ...]:
    """The shape that the header of an IDX file of bytes declares, checked against the size of the file."""
    path = Path(path)
    with _stream(path) as file:
        return _shape(file, path)


def read_idx(path: str | Path) -> np.ndarray:
    """Read one IDX file of bytes, plain or gzipped; only what its header declares is unpacked."""
    path = Path(path)
    with _stream(path) as file:
        shape = _shape(file, path)
        count = math.prod(shape)
        data = file.read(count)
        if len(data) < count:
            raise DataError(f"{path}: {len(data)} bytes do not hold {shape} values; fetch it again")
        if file.read(1):
            raise DataError(f"{path}: holds more than the declared {shape} values; fetch it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _shape(file: io.BufferedIOBase, path: Path) -> tuple[int, ...]:
    start = file.read(4)
    if len(start) < 4 or start[:3] != b"\x00\x00\x08" or not 1 <= start[3] <= 4:
        raise DataError(f"{path}: not an IDX file of unsigned bytes; fetch it again")
    sizes = file.read(4 * start[3])
    if len(sizes) < 4 * start[3]:
        raise DataError(f"{path}: ends inside its header; fetch it again")
    shape = struct.unpack(f">{start[3]}I", sizes)
    packed, most = path.stat().st_size, MAX_BYTES
    if path.suffix == ".gz":
        most = min(MAX_BYTES, max(SMALL, MAX_RATIO * packed))
    elif packed < MAX_BYTES:
        most = packed
    if math.prod(shape) > most:
        raise DataError(f"{path}: {packed} bytes do not hold {shape} values; fetch it again")
    return shape


@contextmanager
def _stream(path: Path) -> Iterator[io.BufferedIOBase]:
    try:
        with path.open("rb") as stored:
            yield gzip.GzipFile(fileobj=stored) if path.suffix == ".gz" else stored
    except DataError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); fetch it again") from error


def _candidates(folder: Path, name: str) -> list[Path]:
    dotted = name.replace("-idx", ".idx")
    return [p for n in (name, f"{name}.gz", dotted, f"{dotted}.gz") if (p := folder / n).is_file()]


def _find(folder: Path, name: str) -> Path:
    found = _candidates(folder, name)
    if not found:
        raise DataError(f"{folder}: {name}(.gz) is missing; put the four IDX files there")
    return found[0]


def _beside(folder: Path, prefix: str) -> LeftOut:
    """Other files of the folder, counted with the first split."""
    if prefix != idx_splits(folder)[0]:
        return LeftOut()
    names = (f"{prefix}-{part}" for prefix in ("train", "t10k") for part in _PARTS)
    return beside(folder, {found[0].name for name in names if (found := _candidates(folder, name))})
