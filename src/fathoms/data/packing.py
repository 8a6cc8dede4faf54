"""Pack a data set into tar shards that load fast: smaller images, offsets in an index.

A shard is written under a temporary name and renamed when complete, after its table; after an interruption, finished
shards are kept and packing resumes. The shards are plain WebDataset, so other tools read them too. Nothing in the
target is replaced or deleted but what packing wrote.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fathoms.config_checks import check_ranges, ranged
from fathoms.data.counter_rng import generator
from fathoms.data.dataset_check import ordered_map
from fathoms.data.images.decode import Decoder, choose_decoder
from fathoms.data.images.pixels import resize
from fathoms.data.sources.pack_index import INDEX_FORMAT, INDEX_NAME, is_shard_name, shard_file, shard_path
from fathoms.data.sources.source import BadImageError, DataError, Source, is_image
from fathoms.data.sources.splits import detect
from fathoms.data.sources.tar_files import CLASS_LIST
from fathoms.errors import ConfigError
from fathoms.files import open_own, sync_folder, write_atomic
from fathoms.untrusted import read_json, read_plain, sha256_of

# Index, bytes read, bytes to store or None, and why there are none.
Repacked = tuple[int, int, bytes | None, str]


@dataclass(frozen=True)
class PackOptions:
    """Options of re-encoding, by the names of their flags."""

    max_side: int | None = ranged(500, least=1)
    """Longest side in pixels; larger images are shrunk."""
    short_side: int | None = ranged(None, least=1)
    """Shortest side in pixels, instead of `max_side`."""
    quality: int = ranged(90, least=1, most=100)
    """JPEG quality; colour is stored at half resolution (4:2:0)."""
    shard_samples: int = ranged(4096, least=1)
    """Images per shard."""

    def __post_init__(self) -> None:
        if (self.max_side is None) == (self.short_side is None):
            found = "is missing, and so is" if self.max_side is None else "cannot be combined with"
            raise ConfigError(f"--max-side: {found} --short-side; give one of the two")
        check_ranges(self, "--")


@dataclass(frozen=True)
class PackResult:
    """Result of packing one split."""

    samples: int
    shards_written: int
    shards_kept: int
    bytes_in: int
    bytes_out: int
    skipped: tuple[tuple[str, str], ...]


def target_size(height: int, width: int, options: PackOptions) -> tuple[int, int]:
    """The size an image is stored at; never larger than it is."""
    if options.max_side is not None:
        scale = options.max_side / max(height, width)
    else:
        scale = (options.short_side or 1) / min(height, width)
    if scale >= 1:
        return height, width
    return max(1, round(height * scale)), max(1, round(width * scale))


def repack(data: bytes, decoder: Decoder, options: PackOptions) -> bytes:
    """The bytes to store: re-encoded, or the original ones if they are smaller and load in the same way."""
    from PIL import Image

    header = decoder.header(data)
    pixels = decoder.decode(data, header=header)
    size = target_size(*header.shown, options)
    small = resize(pixels, *size, cubic=True).permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(small).save(buffer, "JPEG", quality=options.quality, subsampling=2)
    plain = header.format == "JPEG" and header.components == 3 and not header.progressive
    same = plain and header.orientation == 1 and header.shown == size
    return data if same and len(data) <= len(buffer.getvalue()) else buffer.getvalue()


def pack_split(
    source: Source,
    folder: Path,
    options: PackOptions,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, Any], PackResult]:
    """Write the shards of one split; returns its entry for the index, and a result to report."""
    folder.mkdir(parents=True, exist_ok=True)
    decoder = choose_decoder("auto")

    def work(index: int) -> Repacked:
        try:
            data = source.read(index)
            return index, len(data), repack(data, decoder, options), ""
        except (BadImageError, OSError) as error:
            return index, 0, None, str(error)

    # Shuffled once, so that a shard read from end to end is a fair sample of the classes.
    order = generator(0, 0, "order", len(source)).permutation(len(source))
    wanted = {"source": source.fingerprint(), "options": asdict(options)}
    shards, skipped = [], []
    written = kept = done = bytes_in = 0
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for number, start in enumerate(range(0, len(order), options.shard_samples)):
            chosen = order[start : start + options.shard_samples]
            path = shard_file(folder, source.split, number)
            facts = _finished(path, wanted)
            if facts is None:
                repacked = ordered_map(pool, work, chosen.tolist())
                facts = _write_shard(
                    path, source, repacked, wanted, lambda n, before=done: progress(before + n)
                )
                written += 1
            else:
                kept += 1
            done += len(chosen)
            progress(done)
            shards.append({"name": path.name, **{k: facts[k] for k in ("bytes", "sha256", "count")}})
            skipped += [(str(name), str(reason)) for name, reason in facts["skipped"]]
            bytes_in += facts["bytes_in"]
    samples = sum(shard["count"] for shard in shards)
    entry = {"shards": shards, "samples": samples, "skipped": skipped, "source": wanted["source"]}
    size = sum(shard["bytes"] for shard in shards)
    return entry, PackResult(samples, written, kept, bytes_in, size, tuple(skipped))


def _finished(path: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The table of a shard that an earlier run completed with the same source and options."""
    facts = _read(path.with_suffix(".json"))
    whole = path.is_file() and path.stat().st_size == facts.get("bytes")
    # A shard that was damaged in its place has its size still.
    return facts if whole and _is_of(facts, wanted) and sha256_of(path) == facts.get("sha256") else None


def _write_shard(
    path: Path,
    source: Source,
    repacked: Iterable[Repacked],
    wanted: dict[str, Any],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    samples: list[list[Any]] = []
    skipped: list[tuple[str, str]] = []
    bytes_in = 0
    temporary = path.with_name(f".{path.name}.tmp")
    with open_own(temporary, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for position, (index, size, data, reason) in enumerate(repacked):
                bytes_in += size
                if data is None:
                    skipped.append((source.where(index), reason))
                    continue
                key = f"{index:09d}"
                offset = _add(archive, f"{key}.jpg", data)
                _add(archive, f"{key}.cls", str(int(source.labels[index])).encode())
                samples.append([f"{key}.jpg", int(source.labels[index]), offset, len(data)])
                if position % 64 == 0:
                    progress(position)
        file.flush()
        os.fsync(file.fileno())
    facts = {
        **wanted,
        "bytes": temporary.stat().st_size,
        "sha256": sha256_of(temporary),
        "count": len(samples),
        "bytes_in": bytes_in,
        "skipped": skipped,
        "samples": samples,
    }
    # The shard comes last: one without its table is somebody else's file, and is not replaced.
    path.unlink(missing_ok=True)
    write_atomic(path.with_suffix(".json"), json.dumps(facts).encode())
    temporary.replace(path)
    sync_folder(path.parent)
    return facts


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> int:
    """Append a member and return the offset of its bytes; owner and time stay zero."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))
    # addfile pads to whole blocks, so the data starts one rounded length before the new end.
    return archive.offset - -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def write_index(folder: Path, classes: tuple[str, ...], splits: dict[str, Any], options: PackOptions) -> None:
    content = {"format": INDEX_FORMAT, "classes": list(classes), "options": asdict(options), "splits": splits}
    write_atomic(folder / INDEX_NAME, json.dumps(content, indent=1).encode())
    write_atomic(folder / CLASS_LIST, class_list(classes))


def class_list(classes: tuple[str, ...]) -> bytes:
    return ("\n".join(classes) + "\n").encode()


def verify_pack(folder: Path) -> list[str]:
    """Names of shards whose bytes no longer have the sha256 in the index."""
    splits = read_json(folder / INDEX_NAME, DataError)["splits"].values()
    shards = [shard for split in splits for shard in split["shards"]]
    return [str(s["name"]) for s in shards if sha256_of(shard_path(folder, s["name"])) != s["sha256"]]


# Facts in the table of every shard that any version has packed.
_TABLE = {"source", "options", "bytes", "sha256", "count", "samples"}


def check_pack_target(folder: Path, sources: Sequence[Source], options: PackOptions) -> None:
    """Refuse a folder in which packing would replace a file that is not of the same pack."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file, not a folder; give another target")
    pack = {source.split: source.fingerprint() for source in sources}
    others = []
    if (folder / INDEX_NAME).is_file() and _made_of(folder / INDEX_NAME) != (asdict(options), pack):
        others.append(folder / INDEX_NAME)
    if not _holds(folder / CLASS_LIST, class_list(sources[0].classes)):
        others.append(folder / CLASS_LIST)
    for source in sources:
        wanted = {"source": pack[source.split], "options": asdict(options)}
        for number in range(-(-len(source) // options.shard_samples)):
            path = shard_file(folder, source.split, number)
            if not _is_of(_read(path.with_suffix(".json")), wanted):
                others += [path, path.with_suffix(".json")]
    for path in others:
        if os.path.lexists(path):
            raise DataError(
                f"{path}: is there already, of other data or options; give another target, or --overwrite to "
                "replace it"
            )


def check_no_other_data(folder: Path) -> None:
    """Refuse a folder that holds a data set of another kind: with an index in it, it would be read as the pack."""
    if not folder.is_dir():
        return
    # Class folders, alone or in those of splits.
    files = (path for at in ("*", "*/*", "*/*/*") for path in folder.glob(at))
    what = next((str(path.relative_to(folder)) for path in files if is_image(path.name)), None)
    if (kind := detect(folder)) in ("hub", "idx", "cifar"):
        what = f"of kind {kind}"
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


def _made_of(index: Path) -> tuple[Any, dict[str, Any]] | None:
    """The options of a pack and the fingerprint of each of its sources; None if its index is damaged."""
    table = _read(index)
    try:
        return table["options"], {name: entry["source"] for name, entry in table["splits"].items()}
    except (KeyError, TypeError, AttributeError):
        return None


def _is_of(facts: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a shard's table says that it was packed from this source with these options."""
    return all(facts.get(key) == wanted[key] for key in wanted)


def _read(path: Path) -> dict[str, Any]:
    """The table in a file; empty for one that is missing or damaged."""
    try:
        return read_json(path, DataError)
    except DataError:
        return {}
