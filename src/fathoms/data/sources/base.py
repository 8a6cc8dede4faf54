"""The source protocol: a list of encoded images with labels, read one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Protocol, runtime_checkable

import numpy as np

from fathoms.data.errors import DataError
from fathoms.data.sources.image_formats import IMAGE_SUFFIXES
from fathoms.files.untrusted import check_names

# Bytes of one encoded image: 16 bits in four channels of the largest that is decoded, uncompressed.
MAX_FILE = 1 << 29

# A split goes by several names; the first that exists is used, and `Source.split` is that name.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid"),
    "test": ("test",),
    "all": ("all",),
}


@runtime_checkable
class Source(Protocol):
    """A split of a data set whose images are encoded files.

    `read` is thread-safe. `where` is a name that a user can act on.
    """

    kind: str
    split: str
    classes: tuple[str, ...]
    labels: np.ndarray

    def __len__(self) -> int:
        """Number of images."""
        ...

    def read(self, index: int) -> bytes:
        """The encoded bytes of one image."""
        ...

    def where(self, index: int) -> str:
        """Name of one image, for error messages."""
        ...

    def size(self, index: int) -> int:
        """Bytes of one encoded image."""
        ...

    def fingerprint(self) -> str:
        """Hash that changes when an image is added, removed, renamed, relabelled or replaced, but not with its path."""
        ...


def is_image(name: str) -> bool:
    """Whether a file name has an image's suffix; hidden files do not count."""
    path = PurePosixPath(name)
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def digest_lines(lines: Iterable[str]) -> str:
    """sha256 over lines, as hexadecimal text."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape"))
        digest.update(b"\n")
    return digest.hexdigest()


def describe(source: Source) -> str:
    """Hash of names, sizes and labels: the fingerprint of earlier versions, and part of today's."""
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
    known = {name for other in SPLIT_NAMES.values() for name in other}
    folders = sorted(set(names))
    odd = next((name for name in folders if name not in known and name.lower() in known), None)
    if odd is not None:
        # As a class it would teach the model to tell the training images from the others.
        raise DataError(f"{where}: folder {odd!r} would be a class; rename it to {odd.lower()!r}")
    return sorted((name for name in folders if name in known), key=training_first) or ["all"]


def training_first(name: str) -> tuple[bool, str]:
    """Sorts the training split before all others."""
    return name not in SPLIT_NAMES["train"], name


def class_table(
    names: Sequence[str], reference: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names and the label of each sample.

    The training split numbers the classes; a held-out split with a class of its own cannot be scored.
    """
    own = sorted(set(names))
    check_names(own, where, DataError)
    classes = check_names(list(reference), where, DataError) if reference else tuple(own)
    extra = [name for name in own if name not in set(classes)]
    if extra:
        raise DataError(f"{where}: class {extra[0]!r} is not among the training classes; rename or remove it")
    number = {name: i for i, name in enumerate(classes)}
    return classes, np.array([number[name] for name in names], np.int64)
