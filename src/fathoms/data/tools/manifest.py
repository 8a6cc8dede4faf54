"""Manifest of a checked data set: every file with size, label and sha256, to detect and name changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathoms.data.errors import DataError
from fathoms.data.sources.arrays import ArraySource
from fathoms.data.sources.base import Source
from fathoms.data.sources.fingerprint import earlier_fingerprint
from fathoms.data.sources.left_out import MANIFEST_NAME
from fathoms.files.atomic import write_atomic
from fathoms.files.untrusted import read_json

MANIFEST_FORMAT = "fathoms-manifest-1"
_BEGIN = b'{"format": "fathoms-manifest-'


@dataclass(frozen=True)
class FileRow:
    """One file of a split: name, size, label and sha256."""

    name: str
    size: int
    label: int
    sha256: str


def default_manifest(path: str | Path) -> Path:
    """Default path of the manifest of the data set at `path`."""
    place = Path(path)
    return place / MANIFEST_NAME if place.is_dir() else place.with_name(f"{place.name}.{MANIFEST_NAME}")


def is_manifest(path: Path) -> bool:
    """Whether a file begins as a manifest does, of any version, damaged or not."""
    try:
        with path.open("rb") as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def write_manifest(path: Path, splits: dict[str, dict[str, Any]], rows: dict[str, list[FileRow]]) -> None:
    """Store the fingerprint, classes and files of each split."""
    content = {
        "format": MANIFEST_FORMAT,
        "splits": {
            name: {**facts, "files": [[r.name, r.size, r.label, r.sha256] for r in rows[name]]}
            for name, facts in splits.items()
        },
    }
    write_atomic(path, json.dumps(content, ensure_ascii=True, indent=None).encode())


def verify_manifest(path: str | Path, source: Source | ArraySource) -> dict[str, Any]:
    """Compare `source` with its manifest; raises `DataError` naming the first file that changed.

    Fingerprints are compared; where they differ, names, sizes and classes, and then the contents. Files that the
    check found bad may have been removed.

    Returns:
        The manifest's entry of the split (counts, classes, bad files).
    """
    manifest = read_json(path, DataError)
    if manifest.get("format") != MANIFEST_FORMAT:
        raise DataError(f"{path}: not a manifest of this version; run `fathoms data check` again")
    splits = manifest.get("splits")
    facts = splits.get(source.split) if isinstance(splits, dict) else None
    if not isinstance(facts, dict):
        raise DataError(f"{path}: it has no split {source.split!r}; run `fathoms data check` again")
    if facts.get("fingerprint") in (source.fingerprint(), earlier_fingerprint(source)):
        return facts
    change = _first_change(facts, source)
    if change is None:
        return facts
    raise DataError(f"{path}: {change} since the check; run `fathoms data check` again")


def verify_sources(path: str | Path, sources: Iterable[Source | ArraySource]) -> None:
    """Compare splits of the data set at `path` with its manifest, if it has one."""
    manifest = default_manifest(path)
    if manifest.is_file():
        for source in sources:
            verify_manifest(manifest, source)


def _first_change(facts: dict[str, Any], source: Source | ArraySource) -> str | None:
    """The first change; None if only bad files are gone."""
    if isinstance(source, ArraySource):
        return (
            "the list of classes changed"
            if facts.get("classes") != list(source.classes)
            else "the arrays changed"
        )
    try:
        classes = list(facts["classes"])
        before = {str(name): (size, classes[label]) for name, size, label, _ in facts["files"]}
        bad = {str(name) for name, _ in facts.get("bad", ())}
    except (KeyError, TypeError, ValueError, IndexError):
        return "the manifest is damaged and cannot be compared"
    labels = source.labels.tolist()
    now = {source.where(i): (source.size(i), source.classes[labels[i]]) for i in range(len(source))}
    for name in sorted(before.keys() - now.keys() - bad):
        return f"{name} disappeared"
    for name in sorted(now.keys() - before.keys()):
        return f"{name} was added"
    for name, value in now.items():
        if before[name] != value:
            return f"{name} changed"
    # A class goes with its last file, and an empty one may have been added to the list.
    gone = set(classes) - set(source.classes)
    if gone & {name for file, (_, name) in before.items() if file in now} or set(source.classes) - set(
        classes
    ):
        return "the list of classes changed"
    # A file that is gone changes the fingerprint too, which then says nothing about the others.
    return None if before.keys() - now.keys() else _replaced(facts, source)


def _replaced(facts: dict[str, Any], source: Source) -> str:
    """The first file that was replaced by another of its size, found by reading the files up to it."""
    hashes = {str(name): digest for name, _, _, digest in facts["files"]}
    for index in range(len(source)):
        name = source.where(index)
        try:
            same = hashes[name] in ("", hashlib.sha256(source.read(index)).hexdigest())
        except (OSError, DataError):
            same = False
        if not same:
            return f"{name} changed"
    return "the contents changed"
