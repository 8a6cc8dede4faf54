"""The source protocol: encoded images with labels, read one by one. Names of splits, classes and formats; errors.

| format of Pillow that is left out | because |
|---|---|
| EPS, WMF, EMF | drawing them runs another program (Ghostscript, Windows) |
| BUFR, GRIB, HDF5, MPEG, MIC, FPX | Pillow only recognises them, or needs code that others register |
| ICO, ICNS, CUR, DCX, PSD, IPTC | containers: the picture inside may be larger than the size that was checked |
| FITS, SPIDER, IM, IMT, MCIDAS | measurements without a range that would be black and white |
| BLP, DDS, FTEX, GBR, FLI, PCD, PIXAR, MSP, SUN, XBM, XPM, XVTHUMB | textures and brushes: hardly tested readers |
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fathoms.errors import FathomsError, printable
from fathoms.untrusted import check_names


class DataError(FathomsError):
    """A data set that cannot be used as asked; the message says what to do."""


class BadImageError(DataError):
    """One image that cannot be decoded, or must not be."""


class ArchiveError(DataError):
    """An archive that is damaged or tries something an image archive has no need for."""


class LoaderError(DataError):
    """A loader worker that died or hung; the message names it and the file it held."""


SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "AVIF": (".avif", ".avifs"),
    "TIFF": (".tif", ".tiff"),
    "BMP": (".bmp",),
    "DIB": (".dib",),
    "GIF": (".gif",),
    "JPEG2000": (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "TGA": (".tga",),
    "PCX": (".pcx",),
    "SGI": (".sgi",),
    "QOI": (".qoi",),
}
"""Pillow's name of each format, in the order in which they are tried, and the file names that count as images."""
FORMATS = tuple(SUFFIXES)
IMAGE_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)


@functools.cache
def formats_here() -> tuple[str, ...]:
    """The formats that the installed Pillow has a reader for."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


MANIFEST_NAME = "fathoms-manifest.json"
OUTSIDE_OF_CLASSES = "image outside of a class folder"
_SHOWN = 6
_LONGEST = 60


class LeftOut:
    """Counts of what was not taken, by kind, with the first name of each.

    What lies outside of all splits is counted with the first of them.

    >>> left = LeftOut()
    >>> left.add_file("train/ape/notes.txt")
    >>> left.add_file("train/ape/more.txt")
    >>> left.describe()
    'left out: 2 × .txt (train/ape/notes.txt …)'
    """

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, name: str, count: int = 1) -> None:
        """Count `count` things of a kind, the first of which is called `name`."""
        before, first = self.kinds.get(kind, (0, name))
        self.kinds[kind] = (before + count, first)

    def add_file(self, name: str) -> None:
        path = PurePosixPath(name)
        kind = path.suffix.lower() or "file without a suffix"
        self.add("hidden file" if path.name.startswith(".") else kind, name)

    def add_all(self, other: LeftOut) -> None:
        for kind, (count, first) in other.kinds.items():
            self.add(kind, first, count)

    def to_json(self) -> dict[str, Any]:
        return {kind: {"count": count, "first": first} for kind, (count, first) in self.kinds.items()}

    def describe(self) -> str:
        ordered = sorted(self.kinds.items(), key=lambda item: (-item[1][0], item[0]))
        parts = []
        for kind, (count, first) in ordered[:_SHOWN]:
            example = f"{_short(first)} …" if count > 1 else _short(first)
            parts.append(f"{count} × {_short(kind)} ({example})")
        rest = sum(count for _, (count, _) in ordered[_SHOWN:])
        parts += [f"{rest} × other kinds"] if rest else []
        return "left out: " + ", ".join(parts) if parts else ""


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LONGEST else f"…{shown[1 - _LONGEST :]}"


def beside(folder: Path, taken: set[str]) -> LeftOut:
    """Contents of a folder other than the files that are taken by name, and the manifest."""
    left = LeftOut()
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name not in taken:
            left.add("folder", f"{entry.name}/")
        elif entry.name not in taken | {MANIFEST_NAME}:
            left.add_file(entry.name)
    return left


def left_out_of(*sources: Any) -> LeftOut:
    """Files that the readers of these splits did not take; a part of a split stands for the whole of it."""
    total = LeftOut()
    whole = {id(source): source for source in (getattr(split, "source", split) for split in sources)}
    for source in whole.values():
        total.add_all(getattr(source, "left_out", LeftOut()))
    return total


# Bytes of one encoded image: 16 bits in four channels of the largest that is decoded, uncompressed.
MAX_FILE = 1 << 29

# A split goes by several names; the first that exists is used, and `Source.split` is that name.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid"),
    "test": ("test",),
    "all": ("all",),
}
KNOWN_SPLITS = {name for names in SPLIT_NAMES.values() for name in names}


@runtime_checkable
class Source(Protocol):
    """A split of a data set whose images are encoded files.

    `read` gives the encoded bytes of an image, in any thread; `size` says how many; `where` is its name in messages.
    The fingerprint changes when an image is added, removed, renamed, relabelled or replaced, and not with the path.
    """

    kind: str
    split: str
    classes: tuple[str, ...]
    labels: np.ndarray

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes: ...

    def where(self, index: int) -> str: ...

    def size(self, index: int) -> int: ...

    def fingerprint(self) -> str: ...


def is_image(name: str) -> bool:
    """Whether a file name has an image's suffix; hidden files do not count."""
    path = PurePosixPath(name)
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def digest_lines(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape"))
        digest.update(b"\n")
    return digest.hexdigest()


def describe(source: Source) -> str:
    head = [source.kind, *source.classes]
    body = (f"{source.where(i)}\t{source.size(i)}\t{source.labels[i]}" for i in range(len(source)))
    return digest_lines([*head, *body])


def pick_split(wanted: str, have: Sequence[str], where: str) -> str:
    """Name under which the data set at `where` holds the split `wanted`."""
    for name in SPLIT_NAMES.get(wanted, (wanted,)):
        if name in have:
            return name
    listed = ", ".join(sorted(have)) or "nothing that is named like a split"
    known = [name for name in SPLIT_NAMES.get(wanted, ()) if name != "all"]
    remedy = f"; call it {' or '.join(known)}" if known else ""
    raise DataError(f"{where}: there is no split {wanted!r}; it has {listed}{remedy}")


def split_folders(names: Iterable[str], where: str) -> list[str]:
    """Those of the folders at `where` that are splits, training first, or ["all"] if none is."""
    folders = sorted(set(names))
    odd = next((name for name in folders if name not in KNOWN_SPLITS and name.lower() in KNOWN_SPLITS), None)
    if odd is not None:
        # As a class it would teach the model to tell the training images from the others.
        raise DataError(f"{where}: folder {odd!r} would be a class; rename it to {odd.lower()!r}")
    return sorted((name for name in folders if name in KNOWN_SPLITS), key=training_first) or ["all"]


def training_first(name: str) -> tuple[bool, str]:
    """Sorts the training split before all others."""
    return name not in SPLIT_NAMES["train"], name


def class_order(names: Iterable[str]) -> list[str]:
    """The names of classes in the order of their labels: by their value if all are numbers, else as text.

    >>> class_order(["10", "9", "0"]), class_order(["10", "9", "ape"])
    (['0', '9', '10'], ['10', '9', 'ape'])
    """
    own = set(names)
    if all(name.isascii() and name.isdecimal() for name in own):
        return sorted(own, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))
    return sorted(own)


def class_table(
    names: Sequence[str], reference: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names and the label of each sample.

    The training split numbers the classes; a held-out split with a class of its own cannot be scored.
    """
    own = class_order(names)
    check_names(own, where, DataError)
    classes = check_names(list(reference), where, DataError) if reference else tuple(own)
    extra = [name for name in own if name not in set(classes)]
    if extra:
        raise DataError(f"{where}: class {extra[0]!r} is not among the training classes; rename or remove it")
    number = {name: i for i, name in enumerate(classes)}
    return classes, np.array([number[name] for name in names], np.int64)
