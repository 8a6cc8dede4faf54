"""Images in folders, ROOT/SPLIT/CLASS/any/depth/image.jpg; and fingerprints of file-backed splits.

A fingerprint is of names, sizes and labels, and of the first and last bytes of every file: a file that is replaced by
another of the same size counts as changed, and a copied or moved data set does not. Twelve microseconds a file; of
many files the result is kept in the cache folder of the user, under a digest of their stamps (time of change and
inode), so that the files are opened once.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from fathoms.data.sources.source import (
    KNOWN_SPLITS,
    MANIFEST_NAME,
    MAX_FILE,
    OUTSIDE_OF_CLASSES,
    SPLIT_NAMES,
    DataError,
    LeftOut,
    Source,
    class_order,
    class_table,
    describe,
    digest_lines,
    is_image,
    pick_split,
    split_folders,
)
from fathoms.files import cache_folder, write_atomic
from fathoms.untrusted import read_plain

EDGE = 4096
"""Bytes at the start and at the end of a file that count; all of a file of up to twice as many."""
MANY = 20_000
"""Files from which on the result is kept, and several are opened at a time: a network's delays add up."""
_AT_A_TIME = 8
# A file may change twice within one tick of the clock of its file system.
_SETTLED = 2_000_000_000


def by_content(source: Source, edges: Callable[[int], bytes], stamps: Iterable[os.stat_result]) -> str:
    """The fingerprint of a split, from the first and last bytes of each image and the status of each of its files."""
    if len(source) < MANY:
        return _digest(source, (_seen(edges, index) for index in range(len(source))))
    found = list(stamps)
    lines = [f"{s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino} {s.st_dev}" for s in found]
    path = cache_folder("fingerprints") / digest_lines([describe(source), *lines])
    with contextlib.suppress(OSError, ValueError):
        kept = path.read_text("ascii")
        if len(kept) == 64:
            return kept
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        made = _digest(source, pool.map(lambda index: _seen(edges, index), range(len(source)), chunksize=256))
    if max(s.st_ctime_ns for s in found) < time.time_ns() - _SETTLED:
        # Where the folder cannot be written, the files are read again next time.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, made.encode())
    return made


def edges_of(path: str) -> bytes:
    """The first and last bytes of a regular file."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{path}: it is not a regular file")
        return edges_at(descriptor, 0, about.st_size)
    finally:
        os.close(descriptor)


def edges_at(descriptor: int, offset: int, size: int) -> bytes:
    """The first and last bytes of `size` bytes at an offset of an open file."""
    first = os.pread(descriptor, min(size, EDGE), offset)
    rest = min(size - len(first), EDGE)
    return first if rest <= 0 else first + os.pread(descriptor, rest, offset + size - rest)


def _seen(edges: Callable[[int], bytes], index: int) -> str:
    try:
        return sha256(edges(index)).hexdigest()
    except OSError:
        return "cannot be read"


def _digest(source: Source, seen: Iterable[str]) -> str:
    return digest_lines(["content-1", describe(source), *seen])


def folder_splits(root: Path) -> list[str]:
    """The split folders of `root`, training first, or ["all"] if the class folders are directly in it."""
    return split_folders((entry.name for entry in os.scandir(root) if entry.is_dir()), str(root))


def _walk(base: Path, prefix: str, left: LeftOut) -> list[str]:
    """Image files in the class folders of `base`, relative and sorted; the others are counted.

    Links to folders are not followed: they may lead round in a circle.
    """
    found: list[str] = []
    classes: set[str] = set()
    for place, folders, names in os.walk(base):
        at = os.path.relpath(place, base)
        inside = "" if at == "." else f"{at}/"
        for name in sorted(folders):
            linked = Path(place, name).is_symlink()
            if linked or name.startswith("."):
                left.add("link to a folder" if linked else "hidden folder", f"{prefix}{inside}{name}/")
                folders.remove(name)
            elif not inside:
                classes.add(name)
        folders.sort()
        for name in sorted(names):
            if is_image(name) and inside:
                found.append(inside + name)
            elif is_image(name):
                left.add(OUTSIDE_OF_CLASSES, prefix + name)
            elif inside or name != MANIFEST_NAME:
                left.add_file(f"{prefix}{inside}{name}")
    for name in sorted(classes - {name.split("/", 1)[0] for name in found}):
        left.add("class folder without images", f"{prefix}{name}/")
    return sorted(found)


def _gives_images(entry: os.DirEntry[str]) -> bool:
    """Whether `_walk` finds an image in a folder; the first one ends the search."""
    if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
        return False
    inner: list[os.DirEntry[str]] = []
    with os.scandir(entry.path) as found:
        for below in found:
            if below.is_dir():
                inner.append(below)
            elif is_image(below.name):
                return True
    return any(map(_gives_images, inner))


class FolderSource:
    """One split of an image folder; a class is a folder, its label the index in `class_order`."""

    kind = "folder"

    def __init__(self, root: str | Path, split: str = "train") -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise DataError(f"{self.root}: no such folder; check the path")
        splits = folder_splits(self.root)
        self.split = pick_split(split, splits, str(self.root))
        self.base = self.root if self.split == "all" else self.root / self.split
        self.left_out = LeftOut()
        self._fingerprint: str | None = None
        prefix = "" if self.split == "all" else f"{self.split}/"
        self.names = _walk(self.base, prefix, self.left_out)
        if not self.names:
            raise DataError(_nothing(self.base, self.left_out))
        if prefix and self.split == splits[0]:
            self._count_beside()
        self.classes, self.labels = class_table(
            [name.split("/", 1)[0] for name in self.names], self._training_classes(splits), str(self.base)
        )

    def _count_beside(self) -> None:
        """Count what lies beside the folders of the splits."""
        for entry in sorted(os.scandir(self.root), key=lambda entry: entry.name):
            if entry.is_dir():
                if entry.name not in KNOWN_SPLITS:
                    self.left_out.add("folder beside the splits", f"{entry.name}/")
            elif entry.name != MANIFEST_NAME:
                self.left_out.add_file(entry.name)

    def _training_classes(self, splits: list[str]) -> list[str] | None:
        train = next((name for name in SPLIT_NAMES["train"] if name in splits), None)
        if train is None or train == self.split:
            return None
        return class_order(entry.name for entry in os.scandir(self.root / train) if _gives_images(entry))

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        return read_plain(f"{self.base}/{self.names[index]}", MAX_FILE)

    def where(self, index: int) -> str:
        return self.names[index] if self.split == "all" else f"{self.split}/{self.names[index]}"

    def size(self, index: int) -> int:
        """The size of one file; 0 of a link that leads nowhere, which `read` then refuses."""
        try:
            return (self.base / self.names[index]).stat().st_size
        except OSError:
            return 0

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            paths = [f"{self.base}/{name}" for name in self.names]
            self._fingerprint = by_content(self, lambda index: edges_of(paths[index]), map(_status, paths))
        return self._fingerprint


def _status(path: str) -> os.stat_result:
    """The status of a file, or of a link that leads nowhere."""
    try:
        return os.stat(path)  # noqa: PTH116 - a million of them
    except OSError:
        return os.lstat(path)


def _nothing(base: Path, left: LeftOut) -> str:
    """Why a folder gave no images, and what to do about it."""
    if loose := left.kinds.get(OUTSIDE_OF_CLASSES):
        return (
            f"{base}: its images ({loose[0]}) are not in class folders; "
            f"move them into {base}/CLASS/, one folder for each class"
        )
    if not left.kinds:
        return f"{base}: the folder is empty; put images there as CLASS/image.jpg, or give another path"
    return (
        f"{base}: holds no images ({left.describe()}); images go to {base}/CLASS/, as .jpg, .png or the like"
    )
