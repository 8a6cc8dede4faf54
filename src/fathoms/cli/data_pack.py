"""Pack a data set into tar shards that decode three times as fast; resumable.

Exit status: 0 everything packed, 1 bad files were left out (and listed), 2 packing could not run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from fathoms.cli.flags.early_checks import check_counts
from fathoms.errors import printable
from fathoms.text_table import plural

if TYPE_CHECKING:
    from fathoms.data.packing import PackOptions, PackResult
    from fathoms.data.sources.source import Source

EXAMPLES: str = """\
fathoms data pack photos/ packed/                    longest side 500, quality 90
fathoms data pack photos/ packed/ --short-side 256   smaller and faster still
fathoms data pack photos.tar packed/ --workers 16
After an interruption run the same command again: finished shards are kept.
"""


@dataclass(frozen=True)
class Args:
    """Data set to pack, target folder, and encoding."""

    source: tyro.conf.Positional[str]
    """Folder, .tar, folder of shards, or hfds/NAME."""
    target: tyro.conf.Positional[str]
    """Folder for the shards and index.json."""
    max_side: int | None = None
    """Longest side in pixels; 500 unless --short-side is given."""
    short_side: int | None = None
    """Shortest side in pixels, instead of the longest."""
    quality: int = 90
    """JPEG quality."""
    shard_samples: int = 4096
    """Images per shard."""
    workers: int = 0
    """Threads; 0 means one per core."""
    overwrite: bool = False
    """Replace shards of other data or options that are in the target already, and remove those left over."""
    json: bool = False
    """Print one JSON object on the last line."""


def run(args: Args) -> int:
    check_counts(args, ("workers",), least=0)
    from fathoms.data import ArraySource, DataError, list_splits, open_source
    from fathoms.data.packing import (
        PackOptions,
        check_no_other_data,
        check_pack_target,
        remove_old_shards,
        write_index,
    )
    from fathoms.machine import usable_cores

    max_side = 500 if args.max_side is None and args.short_side is None else args.max_side
    options = PackOptions(max_side, args.short_side, args.quality, args.shard_samples)
    opened = [open_source(args.source, split) for split in list_splits(args.source)]
    sources = [source for source in opened if not isinstance(source, ArraySource)]
    if len(sources) < len(opened):
        raise DataError(
            f"{args.source}: arrays are kept on the device and need no packing; train on them directly"
        )
    folder = Path(args.target)
    if Path(args.source).resolve() in (folder.resolve(), *folder.resolve().parents):
        raise DataError(
            f"{folder}: lies in the data that is packed, and would become part of it; give another target"
        )
    check_no_other_data(folder)
    if not args.overwrite:
        check_pack_target(folder, sources, options)
    packed = _pack(sources, folder, options, args.workers or usable_cores())
    write_index(folder, sources[0].classes, {split: entry for split, (entry, _) in packed.items()}, options)
    removed = remove_old_shards(folder) if args.overwrite else []
    results = {split: result for split, (_, result) in packed.items()}
    _print(sources, results, removed)
    if args.json:
        print(json.dumps(_summary(results, removed, folder)))
    return 1 if any(result.skipped for result in results.values()) else 0


def _pack(
    sources: list[Source], folder: Path, options: PackOptions, workers: int
) -> dict[str, tuple[dict[str, Any], PackResult]]:
    """Write the shards of every split, with a bar; the index entry and the result of each."""
    from fathoms.cli.terminal.live_output import progress_bar
    from fathoms.data.packing import pack_split

    packed, before = {}, 0
    with progress_bar("packing", sum(len(source) for source in sources)) as advance:
        for source in sources:
            packed[source.split] = pack_split(
                source, folder, options, workers, lambda done, before=before: advance(before + done)
            )
            before += len(source)
    return packed


def _print(sources: list[Source], results: dict[str, PackResult], removed: list[str]) -> None:
    from fathoms.data.sources.source import left_out_of

    for split, result in results.items():
        print(
            f"{printable(split)}: {result.samples} images, "
            f"{result.bytes_in / 1e6:.1f} MB to {result.bytes_out / 1e6:.1f} MB; "
            f"{plural(result.shards_written, 'shard')} written, {result.shards_kept} kept from an earlier run"
        )
        if result.bytes_out > result.bytes_in:
            print(
                f"{printable(split)}: the pack is larger than its source; "
                "a lower --quality or a smaller --max-side makes it smaller"
            )
    if removed:
        print(f"{plural(len(removed), 'shard')} of an earlier pack removed")
    beside = left_out_of(*sources).describe()
    if beside:
        print(printable(beside))
    for name, reason in _skipped(results):
        print(printable(f"LEFT OUT {name!r}: {reason}"))


def _skipped(results: dict[str, PackResult]) -> list[tuple[str, str]]:
    """Name and reason of every file that was left out."""
    return [each for result in results.values() for each in result.skipped]


def _summary(results: dict[str, PackResult], removed: list[str], folder: Path) -> dict[str, Any]:
    summed = ("samples", "shards_written", "shards_kept", "bytes_in", "bytes_out")
    return {
        **{fact: sum(getattr(result, fact) for result in results.values()) for fact in summed},
        "shards_removed": len(removed),
        "left_out": [{"name": name, "problem": reason} for name, reason in _skipped(results)],
        "index": str(folder / "index.json"),
    }
