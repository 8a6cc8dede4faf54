"""One split of a small data set as arrays of pixels and labels: .npz files, and the built-in digits.

An .npz holds `x_train`, `y_train`, `x_test` (or `x_val`), … and, if there, `classes`. Nothing is unpickled. The digits
are the 1,797 handwritten ones of scikit-learn, 8x8 pixels.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from jaxtyping import Float, Int, UInt8

from fathoms.config_checks import MAX_TEXT
from fathoms.data.sources.source import DataError, LeftOut
from fathoms.errors import reason
from fathoms.untrusted import MAX_CLASSES, check_names

if TYPE_CHECKING:
    # Looking at a data set takes no torch, which takes seconds to import.
    from torch import Tensor

# Arrays are unpacked into memory; this bounds what an untrusted archive can take.
MAX_BYTES = 8 << 30
# A small archive may unpack to this much, whatever its size.
SMALL = 1 << 28


class ArraySource:
    """One split as uint8 pixels (N, H, W, 3) and labels; small enough to live on the device.

    `kind` is the name of the reader, `where` the file in error messages, `left_out` what the reader did not take.
    """

    def __init__(
        self,
        kind: str,
        split: str,
        images: UInt8[np.ndarray, "N H W 3"],
        labels: np.ndarray,
        classes: Sequence[str],
        where: str | None = None,
        left_out: LeftOut | None = None,
    ) -> None:
        where = where or kind
        if not len(images):
            raise DataError(f"{where}: split {split!r} holds no images; add some or remove the split")
        if not images.size:
            raise DataError(f"{where}: images of split {split!r} are {images.shape[1:]}: they have no pixels")
        if len(images) != len(labels):
            raise DataError(
                f"{where}: {len(images)} images for {len(labels)} labels; the files do not belong together"
            )
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise DataError(
                f"{where}: labels are {labels.dtype} of shape {labels.shape}; whole numbers are expected"
            )
        labels = labels.astype(np.int64)
        classes = check_names(list(classes), f"{where}: classes", DataError)
        if twice := sorted(name for name, count in Counter(classes).items() if count > 1):
            raise DataError(f"{where}: two classes are called {twice[0]!r}; give each a name of its own")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise DataError(
                f"{where}: labels run to {labels.max()} for {len(classes)} classes; check the files"
            )
        self.kind, self.split = kind, split
        self.images, self.labels, self.classes = images, labels, classes
        self.left_out = left_out or LeftOut()
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.images)

    def where(self, index: int) -> str:
        return f"{self.split}[{index}]"

    def fingerprint(self) -> str:
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


def as_source(data: Any, split: str, classes: Sequence[str] | None = None) -> ArraySource:
    """A split from a pair of images and labels, or from a data set whose items are an image and its label.

    A data set's own class names decide what its labels mean; `classes` names those of a pair, and of a data set
    without names.
    """
    where, own = f"data: {split}", None
    if isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(each, "shape") for each in data):
        images, labels = (np.asarray(each) for each in data)
    elif not hasattr(data, "shape") and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        images, labels = _items(data, where)
        own = getattr(data, "classes", None)
    else:
        raise DataError(f"{where}: a pair of images and labels is expected, or a data set of (image, label)")
    labels = _labels(labels, f"{where}: labels")
    names = [str(number) for number in range(int(labels.max()) + 1)]
    if classes is not None and is_numbered(classes):
        # They have no names, so that those of the data set cannot be told from others.
        own = None
    if own is not None and classes is not None and list(own) != list(classes):
        if unknown := sorted(set(own) - set(classes)):
            raise DataError(f"{where}: has a class {unknown[0]!r} that the others do not have; rename it")
        if labels.max() >= len(own):
            raise DataError(
                f"{where}: labels run to {labels.max()} for {len(own)} classes; check the data set"
            )
        labels, own = np.array([list(classes).index(name) for name in own])[labels], classes
    return ArraySource("arrays", split, as_rgb(images, where), labels, own or classes or names, where=where)


def is_numbered(classes: Sequence[str]) -> bool:
    """Whether these are the numbers that stand for names where nobody gave any."""
    return list(classes) == [str(number) for number in range(len(classes))]


def _items(data: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of a data set, item by item."""
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    try:
        for image, label in (data[index] for index in range(len(data))):
            pixels.append(np.asarray(image.convert("RGB") if hasattr(image, "convert") else image))
            labels.append(int(label))
            if labels[-1] != label:
                raise DataError(f"{where}: a label is {label}; give whole numbers, or names in folders")
    # A data set of somebody's own may raise anything, and its items be of any form.
    except (TypeError, ValueError, LookupError) as error:
        raise DataError(
            f"{where}: item {len(labels)} is no image with a whole number as its label ({reason(error)})"
        ) from error
    if len({image.shape for image in pixels}) > 1:
        raise DataError(f"{where}: the images have different sizes; resize them, or give a folder")
    return np.stack(pixels) if pixels else np.empty(0), np.array(labels)


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
        named = _array(archive, "classes") if "classes" in files else None
    if named is not None and named.ndim != 1:
        raise DataError(f"{path}: classes has shape {named.shape}; store one row of names")
    classes = range(1 + max(int(own.max()) for own in labels.values())) if named is None else named
    taken = {"classes"} | {f"{part}_{name}" for part in "xy" for name in _SPLITS}
    left = LeftOut()
    if found == next(name for name in _SPLITS if f"x_{name}" in files):
        for name in sorted(set(files) - taken):
            left.add("array", name)
    names = [str(name) for name in classes]
    return ArraySource("npz", str(found), images, labels[str(found)], names, str(path), left)


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
    """An array whose header has been checked."""
    with archive.open(name if name in archive.namelist() else f"{name}.npy") as member:
        return np.lib.format.read_array(member, allow_pickle=False, max_header_size=MAX_TEXT)


def _header(member: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array that follows."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member, max_header_size=MAX_TEXT)
    return shape, dtype


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
            shape, dtype = _header(member)
        if dtype.hasobject:
            raise DataError(
                f"{path}: not a plain .npz ({name} holds Python objects, which could run code); "
                "store pixels as uint8, labels as whole numbers and names as text"
            )
        # The array's header decides how much is allocated; the size in the archive is not trusted.
        unpacked += max(math.prod(shape) * dtype.itemsize, entry.file_size)
    if unpacked > min(MAX_BYTES, max(SMALL, MAX_RATIO * packed)):
        raise ValueError(f"{packed} bytes would unpack to {unpacked}")


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


TEST_SHARE = 5
"""One digit in five is held out for testing."""


def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "digits.npz") as file:
        return file["images"].astype(np.float64), file["labels"].astype(np.int64)


def digits(image_size: int = 8, in_channels: int = 1) -> tuple[Float[Tensor, "B C H W"], Int[Tensor, " B"]]:
    """All digits, scaled to [-1, 1], and their labels, in the data set's own order.

    Args:
        image_size: Side of the images; other than 8, they are resized (bilinear).
        in_channels: The grey channel is repeated this many times.
    """
    import torch

    pixels, labels = _read_digits()
    images = torch.from_numpy(pixels).float()[:, None] / 8.0 - 1.0
    if image_size != 8:
        images = torch.nn.functional.interpolate(
            images, size=(image_size, image_size), mode="bilinear", antialias=True
        )
    return images.expand(-1, in_channels, -1, -1), torch.from_numpy(labels).long()


def digit_sources() -> tuple[ArraySource, ArraySource]:
    """The digits as a training and a test split, by a fixed shuffle."""
    pixels, labels = _read_digits()
    grey = np.round(pixels * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=3)
    order = np.random.default_rng(0).permutation(len(images))
    names = [str(digit) for digit in range(10)]
    cut = len(order) // TEST_SHARE
    train, test = order[cut:], order[:cut]
    return (
        ArraySource("digits", "train", images[train], labels[train], names),
        ArraySource("digits", "test", images[test], labels[test], names),
    )
