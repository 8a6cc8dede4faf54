"""Images in tar files: WebDataset shards, or a folder in a tar. Nothing is extracted.

Samples are read in place by offset, so any order costs the same, and the number of shards is independent of the number
of workers and ranks. An image archive needs plain files with plain names: links, devices, absolute names, `..`,
duplicate names and entries that reach past the end of the file have no use in one, so they are refused instead of
cleaned up.
"""

from __future__ import annotations

import contextlib
import os
import re
import tarfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import numpy as np

from fathoms.data.sources.image_folder import by_content, edges_at
from fathoms.data.sources.source import (
    IMAGE_SUFFIXES,
    MAX_FILE,
    OUTSIDE_OF_CLASSES,
    SPLIT_NAMES,
    ArchiveError,
    BadImageError,
    DataError,
    LeftOut,
    beside,
    class_order,
    class_table,
    is_image,
    pick_split,
    split_folders,
)
from fathoms.errors import reason
from fathoms.untrusted import MAX_CLASSES, read_names

_BLOCK = 512
# An extended header holds a name or two.
_LONGEST_HEADER = 1 << 16
_LONGEST_NAME = 4096


@dataclass(frozen=True)
class Member:
    """One file of an archive: its name, and the offset and size of its bytes."""

    name: str
    offset: int
    size: int


class _Forward:
    """A file that is only read forwards and in small pieces.

    tarfile trusts headers. A negative size sends older versions back to the same header forever (CVE-2025-8194),
    and an extended header may ask for gigabytes at once.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._furthest = file, 0

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        data = self._file.read(size)
        self._furthest = self._file.tell()
        return data

    def seek(self, place: int) -> None:
        # tarfile seeks to the byte before the next header, which may be the last one read.
        if place < self._furthest - _BLOCK:
            raise ValueError(f"byte {self._furthest} points back to byte {place}")
        self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()


def check_member_name(name: str, where: str) -> None:
    """Refuse a name that points outside the archive or would garble a terminal."""
    parts = PurePosixPath(name).parts
    if not name or name.startswith("/") or "\\" in name or ".." in parts or (parts and ":" in parts[0]):
        raise ArchiveError(f"{where}: member {name[:80]!r} points outside the archive; do not use this file")
    if len(name) > _LONGEST_NAME or any(unicodedata.category(letter) == "Cc" for letter in name):
        raise ArchiveError(
            f"{where}: member {name[:80]!r} is too long or has control characters in its name; rename it"
        )


def read_index(path: str | Path) -> list[Member]:
    """List the files of an uncompressed tar, in order; raises `ArchiveError` with the reason."""
    where, length = str(path), Path(path).stat().st_size
    members: list[Member] = []
    seen: set[str] = set()
    try:
        with (
            Path(path).open("rb") as file,
            tarfile.open(fileobj=cast(BinaryIO, _Forward(file)), mode="r:") as archive,
        ):
            for entry in archive:
                if entry.isdir():
                    # The root of an archive may be listed under an empty name.
                    check_member_name(entry.name or ".", where)
                    continue
                if not entry.isreg() or entry.issparse():
                    kind = "a link" if entry.islnk() or entry.issym() else "not a plain file"
                    raise ArchiveError(
                        f"{where}: member {entry.name[:80]!r} is {kind}; pack plain files only"
                    )
                check_member_name(entry.name, where)
                name = str(PurePosixPath(entry.name))
                if name in seen:
                    raise ArchiveError(f"{where}: member {name[:80]!r} occurs twice; pack it once")
                if entry.size < 0 or entry.offset_data + entry.size > length:
                    raise ArchiveError(f"{where}: member {name[:80]!r} is cut off; copy the archive again")
                seen.add(name)
                members.append(Member(name, entry.offset_data, entry.size))
                # tarfile keeps every entry it has seen; over a million of them that is gigabytes.
                archive.members = []  # pyrefly: ignore[missing-attribute]
            end = archive.offset
    # A chain of extended headers makes tarfile call itself, once for each.
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise ArchiveError(
            f"{where}: not a readable uncompressed tar ({reason(error)}); pack it again"
        ) from error
    # tarfile mistakes a damaged header for the end.
    with Path(path).open("rb") as file:
        file.seek(end)
        if any(file.read(_BLOCK)):
            raise ArchiveError(f"{path}: damaged header at byte {end}; copy the archive again")
    return members


def read_at(descriptor: int, member: Member, archive: str) -> bytes:
    """Read one member; a file that shrank since it was indexed is an error, not a truncated image."""
    size = member.size
    if size > MAX_FILE:
        raise BadImageError(f"its {size} bytes are more than {MAX_FILE}")
    data = os.pread(descriptor, size, member.offset)
    if len(data) != size:
        raise ArchiveError(
            f"{archive}!{member.name}: only {len(data)} of {size} bytes could be read; copy the archive again"
        )
    return data


CLASS_LIST = "classes.txt"
# More open files would hit the usual limit of 1,024; further shards are opened per read.
_KEEP_OPEN = 512
# A label is a number of a few digits, and perhaps the end of a line.
_LONGEST_LABEL = 32


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
        shard, member = self._rows[index]
        return f"{self._names[shard]}!{member.name}"

    def size(self, index: int) -> int:
        return self._rows[index][1].size

    def fingerprint(self) -> str:
        """Hash from the pack's index, or of names, sizes, labels, and the first and last bytes of every image."""
        if self._fingerprint is None:
            self._fingerprint = by_content(self, self._edges, map(os.stat, self.shards))
        return self._fingerprint

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
    reference = class_order(name for name, _ in rows[train]) if train else None
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
        group = groups.setdefault(str(place.parent / stem), {})
        if group.setdefault(suffix.lower(), member) is not member:
            # On a file system that knows no upper case, they would be one file.
            left.add_file(f"{path.name}!{member.name}")
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
    start = Member(label.name, label.offset, min(label.size, _LONGEST_LABEL))
    text = read_at(descriptor, start, path.name).strip()
    if label.size > _LONGEST_LABEL or not re.fullmatch(rb"\d{1,9}", text):
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
