"""Images in folders: ROOT/SPLIT/CLASS/any/depth/image.jpg."""

from __future__ import annotations

import os
from pathlib import Path

from fathoms.data.errors import DataError
from fathoms.data.sources.base import MAX_FILE, SPLIT_NAMES, class_table, describe, is_image, pick_split
from fathoms.untrusted_files import read_plain

_SPLITS = {name for names in SPLIT_NAMES.values() for name in names}


def folder_splits(root: Path) -> list[str]:
    """The split folders of `root`, or ["all"] if the class folders are directly in it."""
    found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name in _SPLITS)
    return found or ["all"]


def _files_of(folder: Path) -> list[str]:
    """Image files below `folder`, relative and sorted; symbolic links to folders are not followed."""
    found: list[str] = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        base = os.path.relpath(place, folder)
        found += [name if base == "." else f"{base}/{name}" for name in names if is_image(name)]
    return sorted(found)


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
        self.names = [name for name in _files_of(self.base) if "/" in name]
        if not self.names:
            raise DataError(f"{self.base}: no images in class folders; the layout is SPLIT/CLASS/image.jpg")
        self.classes, self.labels = class_table(
            [name.split("/", 1)[0] for name in self.names], self._training_classes(splits), str(self.base)
        )

    def _training_classes(self, splits: list[str]) -> list[str] | None:
        train = next((name for name in SPLIT_NAMES["train"] if name in splits), None)
        if train is None or train == self.split:
            return None
        return sorted(entry.name for entry in os.scandir(self.root / train) if entry.is_dir())

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        """The bytes of one file; a pipe, a device or an oversized file is an `OSError`."""
        return read_plain(f"{self.base}/{self.names[index]}", MAX_FILE)

    def where(self, index: int) -> str:
        """The path below the split folder's parent."""
        return self.names[index] if self.split == "all" else f"{self.split}/{self.names[index]}"

    def size(self, index: int) -> int:
        """The size of one file."""
        return (self.base / self.names[index]).stat().st_size

    def fingerprint(self) -> str:
        """A hash of names, sizes and labels."""
        return describe(self)
