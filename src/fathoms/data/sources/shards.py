"""Images in tar files: WebDataset shards, packs made by `fathoms data pack`, or a folder in a tar.

Samples are read in place by offset, so any order costs the same, and the number of shards is independent of the
number of workers and ranks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fathoms.data.errors import ArchiveError, DataError
from fathoms.data.sources.base import SPLIT_NAMES, class_table, describe, digest_lines, is_image, pick_split
from fathoms.data.sources.tar_index import Member, read_at, read_index
from fathoms.untrusted_files import MAX_CLASSES, check_names, read_json, read_names

INDEX_NAME = "index.json"
INDEX_FORMAT = "fathoms-pack-1"
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
        self.shards = shards
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
        if shard < len(self._open):
            return read_at(self._open[shard], member, self._names[shard])
        descriptor = os.open(self.shards[shard], os.O_RDONLY)
        try:
            return read_at(descriptor, member, self._names[shard])
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
        """Hash from the pack's index, or of names, sizes and labels."""
        return self._fingerprint or describe(self)


def open_tar_folder(path: str | Path, split: str = "train") -> ShardSource:
    """Open an image folder (SPLIT/CLASS/image.jpg, or CLASS/image.jpg) inside one tar file."""
    members = [member for member in read_index(path) if is_image(member.name)]
    known = {name for names in SPLIT_NAMES.values() for name in names}
    tops = {member.name.split("/", 1)[0] for member in members}
    have = sorted(tops & known) or ["all"]
    found = pick_split(split, have, str(path))

    def of(name: str) -> list[tuple[str, Member]]:
        parts = [(PurePosixPath(m.name).parts, m) for m in members]
        skip = 0 if name == "all" else 1
        return [(p[skip], m) for p, m in parts if len(p) > skip + 1 and (not skip or p[0] == name)]

    rows = sorted(of(found), key=lambda row: row[1].name)
    train = next((name for name in SPLIT_NAMES["train"] if name in have and name != found), None)
    reference = sorted({name for name, _ in of(train)}) if train else None
    classes, labels = class_table([name for name, _ in rows], reference, str(path))
    return ShardSource("tar-folder", found, [Path(path)], [(0, m) for _, m in rows], labels, classes)


def open_webdataset(paths: list[Path], split: str = "train") -> ShardSource:
    """Open WebDataset shards: KEY.jpg and KEY.cls, the class number in decimal digits."""
    rows: list[tuple[int, Member]] = []
    labels: list[int] = []
    for shard, path in enumerate(paths):
        groups: dict[str, dict[str, Member]] = {}
        for member in read_index(path):
            place = PurePosixPath(member.name)
            stem, _, suffix = place.name.partition(".")
            groups.setdefault(str(place.parent / stem), {})[suffix.lower()] = member
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for key, group in groups.items():
                image = next((m for s, m in group.items() if is_image(f"x.{s}")), None)
                if image is None:
                    continue
                if "cls" not in group:
                    raise ArchiveError(f"{path}: sample {key!r} has no .cls file; add its class number")
                label = group["cls"]
                start = Member(label.name, label.offset, min(label.size, 32))
                text = read_at(descriptor, start, path.name).strip()
                if not re.fullmatch(rb"\d{1,9}", text):
                    raise ArchiveError(f"{path}: sample {key!r} has class {text[:20]!r}; write a number")
                rows.append((shard, image))
                labels.append(int(text))
        finally:
            os.close(descriptor)
    count = max(labels, default=-1) + 1
    if count > MAX_CLASSES:
        raise ArchiveError(f"{paths[0]}: labels run to {count - 1}; number the classes from 0")
    classes = _class_names(paths[0].parent, count)
    return ShardSource("webdataset", split, paths, rows, np.array(labels, np.int64), classes)


def _class_names(folder: Path, count: int) -> tuple[str, ...]:
    """Names from classes.txt in the folder of the shards, one per line; without it, plain numbers."""
    listing = folder / "classes.txt"
    if not listing.is_file():
        return tuple(str(i) for i in range(count))
    names = read_names(listing, DataError)
    if len(names) < count:
        raise DataError(f"{listing}: {len(names)} names for {count} classes; complete the list")
    return names


def shard_path(folder: Path, name: Any) -> Path:
    """Path of a shard named in an index; a name that points elsewhere is an error."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,200}\.tar", name):
        raise DataError(
            f"{folder / INDEX_NAME}: shard name {str(name)[:80]!r} is not a plain name; pack again"
        )
    return folder / name


def open_pack(folder: str | Path, split: str = "train") -> ShardSource:
    """Open shards made by `fathoms data pack`: offsets come from the index, without a scan."""
    folder = Path(folder)
    index = read_json(folder / INDEX_NAME, DataError)
    try:
        if index["format"] != INDEX_FORMAT:
            raise DataError(f"{folder / INDEX_NAME}: format {index['format']!r} is not known; pack again")
        found = pick_split(split, list(index["splits"]), str(folder))
        listed = index["splits"][found]["shards"]
        rows: list[tuple[int, Member]] = []
        labels: list[int] = []
        paths = []
        for number, shard in enumerate(listed):
            path = shard_path(folder, shard["name"])
            if not path.is_file() or path.stat().st_size != shard["bytes"] or type(shard["bytes"]) is not int:
                raise DataError(f"{path}: missing or not {shard['bytes']} bytes long; pack again")
            paths.append(path)
            for member, label, offset, size in read_json(path.with_suffix(".json"), DataError)["samples"]:
                if not all(type(value) is int for value in (label, offset, size)):
                    raise DataError(
                        f"{path}: sample {str(member)[:80]!r} has numbers that are not whole; pack again"
                    )
                if not (offset >= 0 and size >= 0 and offset + size <= shard["bytes"]):
                    raise DataError(f"{path}: sample {str(member)[:80]!r} lies outside the shard; pack again")
                rows.append((number, Member(str(member), offset, size)))
                labels.append(label)
        classes = check_names(index["classes"], str(folder / INDEX_NAME), DataError)
        content = digest_lines([*classes, *(str(shard["sha256"]) for shard in listed)])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / INDEX_NAME}: damaged ({str(error)[:80]!r}); pack again") from error
    if labels and not 0 <= min(labels) <= max(labels) < len(classes):
        raise DataError(f"{folder / INDEX_NAME}: a label is out of range; pack again")
    return ShardSource("pack", found, paths, rows, np.array(labels, np.int64), classes, content)
