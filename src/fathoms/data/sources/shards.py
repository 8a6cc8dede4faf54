"""Images in tar files: WebDataset shards, or a folder in a tar.

Samples are read in place by offset, so any order costs the same, and the number of shards is independent of the
number of workers and ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from fathoms.data.errors import ArchiveError, DataError
from fathoms.data.sources.base import SPLIT_NAMES, class_table, describe, is_image, pick_split, split_folders
from fathoms.data.sources.fingerprint import by_content, edges_at
from fathoms.data.sources.image_formats import IMAGE_SUFFIXES
from fathoms.data.sources.left_out import OUTSIDE_OF_CLASSES, LeftOut, beside
from fathoms.data.sources.tar_index import Member, read_at, read_index
from fathoms.files.untrusted import MAX_CLASSES, read_names

CLASS_LIST = "classes.txt"
# More open files would hit the usual limit of 1,024; further shards are opened per read.
_KEEP_OPEN = 512


class ShardSource:
    """Samples at known offsets of known tar files."""

    def __init__(
        self,
        kind: str,
        split: str,
        shards: list[Path],
        rows: list[tuple[int, Member]],
        labels: np.ndarray,
        classes: tuple[str, ...],
        fingerprint: str | None = None,
    ) -> None:
        if not rows:
            raise DataError(
                f"{shards[0] if shards else split}: no images in split {split!r}; check the archive"
            )
        self.kind, self.split, self.classes, self.labels = kind, split, classes, labels
        self.shards, self.left_out = shards, LeftOut()
        self._rows = rows
        self._fingerprint = fingerprint
        self._names = [path.name for path in shards]
        self._open = [os.open(path, os.O_RDONLY) for path in shards[:_KEEP_OPEN]]

    def __del__(self) -> None:
        for descriptor in getattr(self, "_open", ()):
            os.close(descriptor)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> bytes:
        """The bytes of one member."""
        shard, member = self._rows[index]
        with self._opened(shard) as descriptor:
            return read_at(descriptor, member, self._names[shard])

    @contextlib.contextmanager
    def _opened(self, shard: int) -> Iterator[int]:
        """The descriptor of a shard, which stays open for the first of them."""
        if shard < len(self._open):
            yield self._open[shard]
            return
        descriptor = os.open(self.shards[shard], os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def where(self, index: int) -> str:
        """SHARD!MEMBER."""
        shard, member = self._rows[index]
        return f"{self._names[shard]}!{member.name}"

    def size(self, index: int) -> int:
        """The size of one member."""
        return self._rows[index][1].size

    def fingerprint(self) -> str:
        """Hash from the pack's index, or of names, sizes, labels, and the first and last bytes of every image."""
        if self._fingerprint is None:
            self._fingerprint = by_content(self, self._edges, map(os.stat, self.shards))
        return self._fingerprint

    def earlier_fingerprint(self) -> str:
        """Hash from the pack's index, or of names, sizes and labels."""
        return self.fingerprint() if self.kind == "pack" else describe(self)

    def _edges(self, index: int) -> bytes:
        shard, member = self._rows[index]
        with self._opened(shard) as descriptor:
            return edges_at(descriptor, member.offset, member.size)


def _tar_splits(members: list[Member], path: str | Path) -> list[str]:
    return split_folders((m.name.split("/", 1)[0] for m in members if "/" in m.name), str(path))


def tar_splits(path: str | Path) -> list[str]:
    """The splits of an image folder inside a tar, training first, or ["all"]."""
    return _tar_splits(read_index(path), path)


def open_tar_folder(path: str | Path, split: str = "train") -> ShardSource:
    """Open an image folder (SPLIT/CLASS/image.jpg, or CLASS/image.jpg) inside one tar file."""
    members = read_index(path)
    have = _tar_splits(members, path)
    found = pick_split(split, have, str(path))
    rows: dict[str, list[tuple[str, Member]]] = {name: [] for name in have}
    left = LeftOut()
    for member in members:
        parts = PurePosixPath(member.name).parts
        own = "all" if have == ["all"] else parts[0]
        inside = parts if own == "all" else parts[1:]
        if own in rows and is_image(member.name) and len(inside) > 1:
            rows[own].append((inside[0], member))
        # What is outside of all splits is counted with the first.
        elif own == found or (own not in rows and found == have[0]):
            loose = own in rows and is_image(member.name)
            left.add(OUTSIDE_OF_CLASSES, member.name) if loose else left.add_file(member.name)
    if not rows[found]:
        raise DataError(
            f"{path}: no images in class folders in split {found!r} ({left.describe() or 'it is empty'}); "
            "the layout is SPLIT/CLASS/image.jpg"
        )
    train = next((name for name in SPLIT_NAMES["train"] if name in have and name != found), None)
    reference = sorted({name for name, _ in rows[train]}) if train else None
    chosen = sorted(rows[found], key=lambda row: row[1].name)
    classes, labels = class_table([name for name, _ in chosen], reference, str(path))
    source = ShardSource("tar-folder", found, [Path(path)], [(0, m) for _, m in chosen], labels, classes)
    source.left_out = left
    return source


def _shards_of(folder: Path, split: str) -> tuple[str, list[Path]]:
    """The name under which a folder holds the shards of a split, and the shards; none if there are none."""
    for name in SPLIT_NAMES.get(split, (split,)):
        patterns = (f"{name}-*.tar", f"{name}/*.tar", f"*-{name}-*.tar")
        found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
        if found:
            return name, found
    return split, []


def shard_splits(path: str | Path) -> list[str]:
    """The splits that shards are named after, training first; a single tar is one, "train"."""
    path = Path(path)
    if path.is_file():
        return ["train"]
    return [name for name, shards in (_shards_of(path, split) for split in SPLIT_NAMES) if shards]


def open_shards(path: str | Path, split: str = "train") -> ShardSource:
    """WebDataset shards: one tar file, or a folder with SPLIT-*.tar in it."""
    path = Path(path)
    if path.is_file():
        return open_webdataset([path], split)
    name, found = _shards_of(path, split)
    if not found:
        raise DataError(f"{path}: no shards of split {split!r}; they are called {split}-000000.tar and so on")
    source = open_webdataset(found, name)
    if [name] == shard_splits(path)[:1]:
        shards = {shard for own in SPLIT_NAMES for shard in _shards_of(path, own)[1]}
        names = {shard.relative_to(path).parts[0] for shard in shards}
        source.left_out.add_all(beside(path, names | {CLASS_LIST}))
    return source


def _read_shard(path: Path, left: LeftOut) -> list[tuple[Member, int]]:
    """The images of a shard with their labels; the other files are counted."""
    groups: dict[str, dict[str, Member]] = {}
    for member in read_index(path):
        place = PurePosixPath(member.name)
        stem, _, suffix = place.name.partition(".")
        groups.setdefault(str(place.parent / stem), {})[suffix.lower()] = member
    rows = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for key, group in groups.items():
            # KEY.seg.png belongs to a sample, but is not its image.
            image = next((m for s, m in group.items() if f".{s}" in IMAGE_SUFFIXES), None)
            for member in group.values():
                if member is not image and (image is None or member is not group.get("cls")):
                    left.add_file(f"{path.name}!{member.name}")
            if image is not None:
                rows.append((image, _label(descriptor, path, key, group)))
    finally:
        os.close(descriptor)
    return rows


def _label(descriptor: int, path: Path, key: str, group: dict[str, Member]) -> int:
    """The class number in KEY.cls."""
    if "cls" not in group:
        raise ArchiveError(f"{path}: sample {key!r} has no .cls file; add its class number")
    label = group["cls"]
    start = Member(label.name, label.offset, min(label.size, 32))
    text = read_at(descriptor, start, path.name).strip()
    if not re.fullmatch(rb"\d{1,9}", text):
        raise ArchiveError(f"{path}: sample {key!r} has class {text[:20]!r}; write a number")
    return int(text)


def open_webdataset(paths: list[Path], split: str = "train") -> ShardSource:
    """Open WebDataset shards: KEY.jpg and KEY.cls, the class number in decimal digits."""
    rows: list[tuple[int, Member]] = []
    labels: list[int] = []
    left = LeftOut()
    for shard, path in enumerate(paths):
        for image, label in _read_shard(path, left):
            rows.append((shard, image))
            labels.append(label)
            if label >= MAX_CLASSES:
                raise ArchiveError(f"{path}: labels run to {label}; number the classes from 0")
    classes = _class_names(paths[0].parent, max(labels, default=-1) + 1)
    source = ShardSource("webdataset", split, paths, rows, np.array(labels, np.int64), classes)
    source.left_out = left
    return source


def _class_names(folder: Path, count: int) -> tuple[str, ...]:
    """Names from classes.txt in the folder of the shards, one per line; without it, plain numbers."""
    listing = folder / CLASS_LIST
    if not listing.is_file():
        return tuple(str(i) for i in range(count))
    names = read_names(listing, DataError)
    if len(names) < count:
        raise DataError(f"{listing}: {len(names)} names for {count} classes; complete the list")
    return names
