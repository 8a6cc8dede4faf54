"""Packs: shards with an index, as `fathoms data pack` writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from fathoms.data.sources.source import DataError, LeftOut, beside, digest_lines, pick_split, training_first
from fathoms.data.sources.tar_files import CLASS_LIST, Member, ShardSource
from fathoms.untrusted import check_names, read_json

INDEX_NAME = "index.json"
INDEX_FORMAT = "fathoms-pack-1"


def pack_splits(folder: str | Path) -> list[str]:
    splits = read_json(Path(folder) / INDEX_NAME, DataError).get("splits")
    if not isinstance(splits, dict):
        raise DataError(f"{Path(folder) / INDEX_NAME}: names no splits; pack again")
    return sorted(splits, key=training_first)


def shard_file(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:06d}.tar"


def is_shard_name(name: str) -> bool:
    """Whether a file is called as `shard_file` calls them."""
    return re.fullmatch(r".+-\d{6,}\.tar", name) is not None


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
    source = ShardSource("pack", found, paths, rows, np.array(labels, np.int64), classes, content)
    source.left_out = _left_out(folder, index["splits"], found)
    return source


def _shard_names(entry: Any) -> list[str]:
    """The shards that the index lists for a split; it is checked when that split is opened, and may be damaged."""
    listed = entry.get("shards") if isinstance(entry, dict) else None
    found = [shard for shard in listed if isinstance(shard, dict)] if isinstance(listed, list) else []
    return [str(shard.get("name")) for shard in found]


def _left_out(folder: Path, splits: dict[str, Any], split: str) -> LeftOut:
    """Images that packing left out, and with the first split what lies beside the shards."""
    left = LeftOut()
    if split == min(splits, key=training_first):
        shards = [name for own in splits.values() for name in _shard_names(own)]
        names = {file for name in shards for file in (name, f"{name.removesuffix('.tar')}.json")}
        left.add_all(beside(folder, names | {INDEX_NAME, CLASS_LIST}))
    skipped = splits[split].get("skipped")
    if isinstance(skipped, list) and skipped:
        name = skipped[0][0] if isinstance(skipped[0], list) and skipped[0] else skipped[0]
        left.add("bad image when it was packed", str(name), len(skipped))
    return left
