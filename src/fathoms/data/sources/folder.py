"""Images in folders: ROOT/SPLIT/CLASS/any/depth/image.jpg."""

from __future__ import annotations

import os
from pathlib import Path

from fathoms.data.errors import DataError
from fathoms.data.sources.base import (
    MAX_FILE,
    SPLIT_NAMES,
    class_table,
    describe,
    is_image,
    pick_split,
    split_folders,
)
from fathoms.data.sources.fingerprint import by_content, edges_of
from fathoms.data.sources.left_out import MANIFEST_NAME, OUTSIDE_OF_CLASSES, LeftOut
from fathoms.files.untrusted import read_plain

_SPLITS = {name for names in SPLIT_NAMES.values() for name in names}


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
    """One split of an image folder; a class is a folder, its label the index in the sorted list."""

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
                if entry.name not in _SPLITS:
                    self.left_out.add("folder beside the splits", f"{entry.name}/")
            elif entry.name != MANIFEST_NAME:
                self.left_out.add_file(entry.name)

    def _training_classes(self, splits: list[str]) -> list[str] | None:
        train = next((name for name in SPLIT_NAMES["train"] if name in splits), None)
        if train is None or train == self.split:
            return None
        return sorted(entry.name for entry in os.scandir(self.root / train) if _gives_images(entry))

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        """The bytes of one file; a pipe, a device or an oversized file is an `OSError`."""
        return read_plain(f"{self.base}/{self.names[index]}", MAX_FILE)

    def where(self, index: int) -> str:
        """The path below the split folder's parent."""
        return self.names[index] if self.split == "all" else f"{self.split}/{self.names[index]}"

    def size(self, index: int) -> int:
        """The size of one file; 0 of a link that leads nowhere, which `read` then refuses."""
        try:
            return (self.base / self.names[index]).stat().st_size
        except OSError:
            return 0

    def fingerprint(self) -> str:
        """A hash of names, sizes, labels, and the first and last bytes of every file."""
        if self._fingerprint is None:
            paths = [f"{self.base}/{name}" for name in self.names]
            self._fingerprint = by_content(self, lambda index: edges_of(paths[index]), map(_status, paths))
        return self._fingerprint

    def earlier_fingerprint(self) -> str:
        """A hash of names, sizes and labels."""
        return describe(self)


def _status(path: str) -> os.stat_result:
    """The status of a file, or of a link that leads nowhere."""
    try:
        return os.stat(path)  # noqa: PTH116 - a million of them
    except OSError:
        return os.lstat(path)


def _nothing(base: Path, left: LeftOut) -> str:
    """Why a folder gave no images, and what to do about it."""
    loose = left.count(OUTSIDE_OF_CLASSES)
    if loose:
        return (
            f"{base}: its images ({loose}) are not in class folders; "
            f"move them into {base}/CLASS/, one folder for each class"
        )
    if not left.kinds:
        return f"{base}: the folder is empty; put images there as CLASS/image.jpg, or give another path"
    return (
        f"{base}: holds no images ({left.describe()}); images go to {base}/CLASS/, as .jpg, .png or the like"
    )
