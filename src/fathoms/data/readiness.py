"""Before training: notices about a data set, its manifest, and the checks that refuse it.

A manifest lists every file of a checked data set with size, label and sha256, to detect and name changes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fathoms.data.images.decode import choose_decoder
from fathoms.data.sources.arrays import ArraySource, is_numbered
from fathoms.data.sources.image_folder import folder_splits
from fathoms.data.sources.source import MANIFEST_NAME, DataError, Source, left_out_of
from fathoms.data.sources.splits import AnySource, Roles
from fathoms.errors import ConfigError
from fathoms.files import write_atomic
from fathoms.untrusted import read_json

MANIFEST_FORMAT = "fathoms-manifest-1"
_BEGIN = b'{"format": "fathoms-manifest-'


@dataclass(frozen=True)
class FileRow:
    name: str
    size: int
    label: int
    sha256: str


def default_manifest(path: str | Path) -> Path:
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


def verify_manifest(path: str | Path, source: AnySource) -> dict[str, Any]:
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
    try:
        same = facts.get("fingerprint") == source.fingerprint()
        change = None if same else _first_change(facts, source)
    except (KeyError, TypeError, ValueError, IndexError):
        change = "the manifest is damaged and cannot be compared"
    if change is not None:
        raise DataError(f"{path}: {change} since the check; run `fathoms data check` again")
    return facts


def _first_change(facts: dict[str, Any], source: AnySource) -> str | None:
    """The first change; None if only bad files are gone."""
    if isinstance(source, ArraySource):
        return "the arrays changed"
    rows = {str(name): (size, facts["classes"][label]) for name, size, label, _ in facts["files"]}
    hashes = {str(name): digest for name, _, _, digest in facts["files"]}
    bad = {str(name) for name, _ in facts.get("bad", ())}
    labels = source.labels.tolist()
    now = {source.where(i): (source.size(i), source.classes[labels[i]]) for i in range(len(source))}
    for name in sorted(rows.keys() - now.keys() - bad):
        return f"{name} disappeared"
    for name in sorted(now.keys() - rows.keys()):
        return f"{name} was added"
    for name, value in now.items():
        if rows[name] != value:
            return f"{name} changed"
    # A file that is gone changes the fingerprint too, which then says nothing about the others.
    return None if rows.keys() - now.keys() else _replaced(hashes, source)


def _replaced(hashes: dict[str, str], source: Source) -> str:
    """The first file that was replaced by another of its size, found by reading the files up to it."""
    for index in range(len(source)):
        name = source.where(index)
        try:
            same = hashes[name] in ("", hashlib.sha256(source.read(index)).hexdigest())
        except (OSError, DataError):
            same = False
        if not same:
            return f"{name} changed"
    return "the contents changed"


def check_trainable(path: str | None, roles: Roles) -> None:
    """Refuse data that changed since its check, has one class, or has a class that a split lacks; None: the digits."""
    train = roles.train
    if path is not None and (manifest := default_manifest(path)).is_file():
        for source in roles.whole():
            verify_manifest(manifest, source)
    _check_classes(path, train)
    for split in (roles.val, roles.test):
        odd = [] if split is None else sorted(set(train.classes) ^ set(split.classes))
        if odd:
            raise ConfigError(
                f"{path}: class {odd[0]!r} has no images in one of the splits; fill or remove it"
            )
    empty = np.setdiff1d(np.arange(len(train.classes)), train.labels)
    if len(empty):
        remedy = "fill or remove it"
        if is_numbered(train.classes):
            remedy += ", or number the classes from 0, as numpy.unique(y, return_inverse=True)[1] does"
        raise ConfigError(f"{path}: class {train.classes[empty[0]]!r} has no training images; {remedy}")


def _check_classes(path: str | None, train: AnySource) -> None:
    """Refuse a single class: any model has it right, and learns nothing."""
    if len(train.classes) > 1:
        return
    only = train.classes[0]
    inside = Path(path or "", only)
    if inside.is_dir() and folder_splits(inside) != ["all"]:
        remedy = f"did you mean {inside}?"
    else:
        remedy = "give each class a folder, or a number, of its own"
    raise ConfigError(f"{path}: has one class, {only!r}, and a classifier needs two; {remedy}")


Size = tuple[int, int]

# The built-in digits have 8 x 8 pixels; below that there is hardly a shape to recognise.
TINY = 8
# Files of a split whose headers are read before training; `fathoms data check` reads all of them.
_LOOKED_AT = 32


def notices(sources: Sequence[AnySource]) -> list[str]:
    """Lines about the splits of a data set, the training split first; a few files of each are looked at."""
    train, *held_out = sources
    left = left_out_of(*sources).describe()
    sizes = {source.split: _sizes(source) for source in sources}
    lines = [left] if left else []
    lines += of_classes(sources) + of_sizes(sizes)
    lines += [
        f"warning: {source.split} holds the same images as {train.split}; "
        "its accuracy says nothing about new images"
        for source in held_out
        if _same(train, source)
    ]
    return lines


def of_classes(sources: Sequence[AnySource]) -> list[str]:
    """Lines about a single class, classes of a held-out split that train lacks, and numbers in their own order."""
    train, *held_out = sources
    classes, lines = train.classes, []
    if len(classes) < 2:
        lines.append(f"warning: there is one class, {classes[0]!r}; a classifier needs two")
    for split in held_out:
        extra = np.setdiff1d(split.labels, train.labels)
        if len(extra) and split.classes == classes:
            lines.append(
                f"warning: {split.split} has images of class {classes[extra[0]]!r}, {train.split} has none; "
                "`fathoms train` refuses such data"
            )
    if list(classes) != sorted(classes) and train.kind in ("folder", "tar-folder"):
        lines.append(
            f"classes are numbers and are counted as such: {', '.join(classes[:3])}, …, {classes[-1]}"
        )
    return lines


def of_sizes(sizes: Mapping[str, Counter[Size]]) -> list[str]:
    """Lines about images that are tiny, or of another size in another split, from the count of each size."""
    lines = []
    for split, counted in sizes.items():
        tiny = {size: count for size, count in counted.items() if min(size) < TINY}
        if tiny:
            height, width = min(tiny)
            lines.append(
                f"warning: {sum(tiny.values())} of {counted.total()} {split} images looked at have a side of fewer "
                f"than {TINY} pixels ({height}x{width}); they hold little to learn from"
            )
    # Photographs come in all sizes; only sizes that a whole split shares can contradict another's.
    single = {split: next(iter(counted)) for split, counted in sizes.items() if len(counted) == 1}
    if len(set(single.values())) > 1:
        listed = ", ".join(f"{split} {height}x{width}" for split, (height, width) in single.items())
        lines.append(
            f"warning: splits have images of different sizes ({listed}); all are resized to the model's"
        )
    return lines


def overlaps(digests: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines about splits that hold images of the first one, by the hashes of their images."""
    first, *others = digests
    known = set(digests[first])
    both = {split: sum(digest in known for digest in digests[split]) for split in others}
    return [
        f"warning: {count} of {len(digests[split])} {split} images are also in {first}"
        for split, count in both.items()
        if count
    ]


def _picked(count: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, _LOOKED_AT).astype(int)).tolist()


def _sizes(source: AnySource) -> Counter[Size]:
    if isinstance(source, ArraySource):
        return Counter({source.images.shape[1:3]: len(source)})
    decoder, found = choose_decoder("auto"), Counter[Size]()
    for index in _picked(len(source)):
        try:
            found[decoder.header(source.read(index)).shown] += 1
        # A file that cannot be read is reported by whoever needs it.
        except (DataError, OSError):
            continue
    return found


def median_side(source: AnySource) -> int:
    """The median shorter side in pixels, of the images that are looked at; 0 where none is readable."""
    sides = sorted(min(size) for size in _sizes(source).elements())
    return sides[len(sides) // 2] if sides else 0


def _same(one: AnySource, other: AnySource) -> bool:
    """Whether two splits are copies: the same labels in the same order, and the same images where looked at."""
    if not np.array_equal(one.labels, other.labels):
        return False
    if isinstance(one, ArraySource):
        return isinstance(other, ArraySource) and np.array_equal(one.images, other.images)
    if isinstance(other, ArraySource):
        return False
    try:
        return all(one.read(index) == other.read(index) for index in _picked(len(one)))
    except (DataError, OSError):
        return False
