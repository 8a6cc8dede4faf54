"""The target of packing: a folder in which nothing is replaced or deleted but what packing wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fathoms.data.errors import DataError
from fathoms.data.sources.base import Source, is_image
from fathoms.data.sources.detect import detect
from fathoms.data.sources.pack import INDEX_NAME, is_shard_name, shard_file
from fathoms.data.sources.shards import CLASS_LIST
from fathoms.data.tools.pack import PackOptions, class_list
from fathoms.files.untrusted import read_json, read_plain

# Facts in the table of every shard that any version has packed.
_TABLE = {"source", "options", "bytes", "sha256", "count", "samples"}


def check_pack_target(folder: Path, sources: Sequence[Source], options: PackOptions) -> None:
    """Refuse a folder in which packing would replace a file that is not of the same pack."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file, not a folder; give another target")
    index, pack = folder / INDEX_NAME, {source.split: source.fingerprint() for source in sources}
    if index.is_file():
        table = _read(index)
        if _sources(table.get("splits")) != pack or table.get("options") != asdict(options):
            raise _other_pack(index)
    listing = folder / CLASS_LIST
    if os.path.lexists(listing) and not _holds(listing, class_list(sources[0].classes)):
        raise _other_pack(listing)
    for source in sources:
        wanted = {"source": pack[source.split], "options": asdict(options)}
        for number in range(-(-len(source) // options.shard_samples)):
            path = shard_file(folder, source.split, number)
            there = [file for file in (path, path.with_suffix(".json")) if os.path.lexists(file)]
            if there and not _is_of(path.with_suffix(".json"), wanted):
                raise _other_pack(there[0])


def check_no_other_data(folder: Path) -> None:
    """Refuse a folder that holds a data set of another kind: with an index in it, it would be read as the pack."""
    if not folder.is_dir():
        return
    kinds = {"hub": "a data set of the Hub", "idx": "IDX files", "cifar": "CIFAR files"}
    # Class folders, alone or in those of splits.
    images = next(
        (path for at in ("*", "*/*", "*/*/*") for path in folder.glob(at) if is_image(path.name)), None
    )
    what = kinds.get(detect(folder)) or (images and str(images.relative_to(folder)))
    if what is not None:
        raise DataError(
            f"{folder}: holds other data ({what}), which the pack would hide; give another target"
        )


def remove_old_shards(folder: Path) -> list[str]:
    """Delete shards of an earlier pack that the index does not list, with their tables; returns their names.

    Other readers of WebDataset take every .tar of a folder, and would see old images beside the new ones. A shard is
    known by the table that packing writes with it; other files stay.
    """
    splits = read_json(folder / INDEX_NAME, DataError)["splits"].values()
    listed = {str(shard["name"]) for split in splits for shard in split["shards"]}
    removed = []
    for table in sorted(folder.glob("*-*.json")):
        shard = table.with_suffix(".tar")
        if shard.name not in listed and is_shard_name(shard.name) and _read(table).keys() >= _TABLE:
            # The table comes last: after an interruption it still tells whose the shard is.
            shard.unlink(missing_ok=True)
            table.unlink()
            removed.append(shard.name)
    return removed


def _holds(path: Path, data: bytes) -> bool:
    try:
        return read_plain(path, len(data)) == data
    except OSError:
        return False


def _sources(splits: Any) -> dict[str, Any]:
    """The fingerprints of what the splits of an index were packed from."""
    entries = splits.items() if isinstance(splits, dict) else ()
    return {name: entry.get("source") if isinstance(entry, dict) else None for name, entry in entries}


def _other_pack(path: Path) -> DataError:
    return DataError(
        f"{path}: is there already, of other data or options; give another target, or --overwrite to replace it"
    )


def _is_of(table: Path, wanted: dict[str, Any]) -> bool:
    """Whether a shard's table says that it was packed from this source with these options."""
    facts = _read(table)
    return all(facts.get(key) == wanted[key] for key in wanted)


def _read(path: Path) -> dict[str, Any]:
    """The table in a file; empty for one that is missing or damaged."""
    try:
        return read_json(path, DataError)
    except DataError:
        return {}
