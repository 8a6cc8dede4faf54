"""Check a data set: decode every image, list bad files and duplicates, write a manifest.

Exit status: 0 no bad files, 1 bad files were found, 2 the check could not run.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from fathoms.cli.flags.early_checks import check_counts
from fathoms.errors import FathomsError, printable
from fathoms.files import check_absent
from fathoms.text_table import plural

if TYPE_CHECKING:
    from fathoms.data.dataset_check import CheckedFile, Report
    from fathoms.data.readiness import AnySource

EXAMPLES: str = """\
fathoms data check photos/                   every split under photos/, manifest written into photos/
fathoms data check photos.tar --json         one JSON object on the last line
fathoms data check photos/ --near -1         skip near duplicates (faster)
"""

_SHOWN = 20


@dataclass(frozen=True)
class Args:
    """Data set to check, and path of the manifest."""

    path: tyro.conf.Positional[str]
    """Folder, .tar, folder of shards, pack, .npz, IDX or CIFAR folder, or hfds/NAME."""
    manifest: str | None = None
    """File to write the manifest to; default: in the data set's folder, or next to its file."""
    near: int = 4
    """Bits by which the perceptual hashes of near duplicates may differ; -1 skips near duplicates."""
    workers: int = 0
    """Decoding threads; 0 means one per core."""
    overwrite: bool = False
    """Replace the file of --manifest; without that flag, the manifest of an earlier check is replaced anyway."""
    json: bool = False
    """Print one JSON object on the last line."""


def run(args: Args) -> int:
    check_counts(args, ("workers",), least=0)
    check_counts(args, ("near",), least=-1)
    from fathoms.cli.terminal.live_output import progress_bar
    from fathoms.data import list_splits, open_source
    from fathoms.data.dataset_check import check_sources
    from fathoms.data.packing import verify_pack
    from fathoms.machine import usable_cores

    sources = [open_source(args.path, split) for split in list_splits(args.path)]
    target = _target(args)
    with progress_bar("checking", sum(len(source) for source in sources)) as advance:
        report = check_sources(sources, args.workers or usable_cores(), args.near, advance)
    damaged = verify_pack(Path(args.path)) if sources[0].kind == "pack" else []
    files = {s.split: [file for file in report.files if file.split == s.split] for s in sources}
    _write(target, sources, files)
    result = _summary(sources, report, files) | {"manifest": str(target), "damaged_shards": damaged}
    _print(sources, report, result)
    if args.json:
        print(json.dumps(result))
    return 1 if report.bad or damaged else 0


def _target(args: Args) -> Path:
    """Path of the manifest; a file there that is not to be replaced is an error."""
    from fathoms.data.readiness import default_manifest, is_manifest

    target = Path(args.manifest) if args.manifest else default_manifest(args.path)
    if not target.parent.is_dir():
        raise FathomsError(f"{target}: its folder does not exist; give --manifest FILE in one that does")
    if args.manifest is not None or not is_manifest(target):
        check_absent([target], args.overwrite)
    return target


def _write(target: Path, sources: list[AnySource], files: dict[str, list[CheckedFile]]) -> None:
    """Write the manifest; arrays are known by their fingerprint, without a row for each image."""
    from fathoms.data import ArraySource, DataError
    from fathoms.data.readiness import write_manifest

    facts = {
        source.split: {
            "kind": source.kind,
            "classes": list(source.classes),
            "fingerprint": source.fingerprint(),
            "count": len(source),
            "bad": [[file.row.name, file.problem] for file in files[source.split] if file.problem],
        }
        for source in sources
    }
    rows = {
        source.split: [] if isinstance(source, ArraySource) else [file.row for file in files[source.split]]
        for source in sources
    }
    try:
        write_manifest(target, facts, rows)
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror}); give --manifest FILE") from error


def _summary(sources: list[AnySource], report: Report, files: dict[str, list[CheckedFile]]) -> dict[str, Any]:
    from fathoms.data.readiness import of_classes, of_sizes, overlaps
    from fathoms.data.sources.source import left_out_of

    balance = {source.split: report.balance(source.classes, source.split) for source in sources}
    good = {split: [file for file in own if not file.problem] for split, own in files.items()}
    warnings = [
        *of_classes(sources),
        *of_sizes({split: Counter(file.shape for file in own) for split, own in good.items()}),
        *overlaps({split: [file.row.sha256 for file in own] for split, own in good.items()}),
        *report.notices(),
    ]
    return {
        "files": len(report.files),
        "bad": [{"name": f.row.name, "problem": f.problem} for f in report.bad],
        "exact_duplicates": report.exact,
        "near_duplicates": [[a, b, bits] for a, b, bits in report.near],
        "across_splits": report.across,
        "classes": {source.split: len(source.classes) for source in sources},
        "smallest_class": {split: min(count.values()) for split, count in balance.items()},
        "largest_class": {split: max(count.values()) for split, count in balance.items()},
        "empty_classes": {s: [n for n, c in count.items() if not c] for s, count in balance.items()},
        "modes": report.modes(),
        "rotated": sum(file.rotated for file in report.files),
        "decoder": report.decoder,
        "left_out": left_out_of(*sources).to_json(),
        "warnings": warnings,
    }


def _print(sources: list[AnySource], report: Report, result: dict[str, Any]) -> None:
    from fathoms.data import ArraySource
    from fathoms.data.sources.source import left_out_of

    shards = result["damaged_shards"]
    for name in shards:
        print(printable(f"BAD {name!r}: its sha256 differs from the index; pack again"))
    noun = "images" if isinstance(sources[0], ArraySource) else "files"
    for source in sources:
        low, high = result["smallest_class"][source.split], result["largest_class"][source.split]
        print(
            f"{printable(source.split)}: {len(source)} {noun} ({source.kind}), {len(source.classes)} classes, "
            f"{low} to {high} good images each"
        )
        empty = result["empty_classes"][source.split]
        if empty:
            print(f"  no good image in: {', '.join(map(repr, empty[:_SHOWN]))}")
    print(f"decoder in use: {report.decoder}")
    if result["modes"]:
        print("stored as: " + ", ".join(f"{mode} {count}" for mode, count in result["modes"].items()))
    if result["rotated"]:
        print(f"rotated upright by EXIF: {result['rotated']}")
    for file in report.bad:
        print(printable(f"BAD {file.row.name!r}: {file.problem}"))
    _print_some("same image", [" = ".join(map(repr, group)) for group in report.exact])
    _print_some("nearly the same", [f"{a!r} ~ {b!r} ({bits} bits)" for a, b, bits in report.near])
    _print_some("in more than one split", [", ".join(map(repr, group)) for group in report.across])
    for line in (left_out_of(*sources).describe(), *result["warnings"]):
        if line:
            print(printable(line))
    damaged = f", {plural(len(shards), 'damaged shard')}" if shards else ""
    bad = f"{len(report.bad)} bad of {len(report.files)} {noun}{damaged}"
    print(printable(f"{bad}; manifest: {result['manifest']}"))


def _print_some(title: str, lines: list[str]) -> None:
    for line in lines[:_SHOWN]:
        print(printable(f"{title}: {line}"))
    if len(lines) > _SHOWN:
        print(f"{title}: {len(lines) - _SHOWN} more (all of them with --json)")
