"""Pack a data set into tar shards that decode three times as fast; resumable.

Exit status: 0 everything packed, 1 bad files were left out (and listed), 2 packing could not run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from fathoms.cli.flags.early_checks import check_counts
from fathoms.errors import printable
from fathoms.text_table import plural

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
    """Replace shards of other data or options that are in the target already."""
    json: bool = False
    """Print one JSON object on the last line."""


def run(args: Args) -> int:
    """Pack every split; returns 1 if files were left out."""
    check_counts(args, ("workers",), least=0)
    from fathoms.cli.terminal.progress import progress_bar
    from fathoms.data import ArraySource, DataError, list_splits, open_source
    from fathoms.data.sources.left_out import left_out_of
    from fathoms.data.tools.pack import PackOptions, pack_split, write_index
    from fathoms.data.tools.pack_target import check_no_other_data, check_pack_target
    from fathoms.machine.cores import usable_cores

    max_side = 500 if args.max_side is None and args.short_side is None else args.max_side
    options = PackOptions(max_side, args.short_side, args.quality, args.shard_samples)
    opened = [open_source(args.source, split) for split in list_splits(args.source)]
    sources = [source for source in opened if not isinstance(source, ArraySource)]
    if len(sources) < len(opened):
        raise DataError(
            f"{args.source}: arrays are kept on the device and need no packing; train on them directly"
        )
    folder = Path(args.target)
    _check_apart(Path(args.source), folder)
    check_no_other_data(folder)
    if not args.overwrite:
        check_pack_target(folder, sources, options)
    workers = args.workers or usable_cores()
    total, before = sum(len(source) for source in sources), 0
    splits, results = {}, []
    with progress_bar("packing", total) as advance:
        for source in sources:
            entry, result = pack_split(
                source, folder, options, workers, lambda done, before=before: advance(before + done)
            )
            splits[source.split] = entry
            results.append((source.split, result))
            before += len(source)
    write_index(folder, sources[0].classes, splits, options)
    skipped = [(name, reason) for _, result in results for name, reason in result.skipped]
    for split, result in results:
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
    beside = left_out_of(*sources).describe()
    if beside:
        print(printable(beside))
    for name, reason in skipped:
        print(printable(f"LEFT OUT {name!r}: {reason}"))
    if args.json:
        print(
            json.dumps(
                {
                    "samples": sum(result.samples for _, result in results),
                    "shards_written": sum(result.shards_written for _, result in results),
                    "shards_kept": sum(result.shards_kept for _, result in results),
                    "bytes_in": sum(result.bytes_in for _, result in results),
                    "bytes_out": sum(result.bytes_out for _, result in results),
                    "left_out": [{"name": name, "problem": reason} for name, reason in skipped],
                    "index": str(folder / "index.json"),
                }
            )
        )
    return 1 if skipped else 0


def _check_apart(source: Path, target: Path) -> None:
    """Refuse a target in the source, whose shards would be part of the data from then on."""
    from fathoms.data import DataError

    if target.resolve() == source.resolve():
        raise DataError(f"{target}: source and target are the same folder; give another target")
    if source.resolve() in target.resolve().parents:
        raise DataError(
            f"{target}: lies in the data that is packed, and would become part of it; give another target"
        )
