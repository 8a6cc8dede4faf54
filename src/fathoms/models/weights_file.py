"""A weights file before any tensor of it is loaded: its header, and its recorded hash.

safetensors' own reader checks lengths, offsets and types. It keeps the last of two entries of one name; here
that is an error. Hashes are recorded in the manifest of a checkpoint folder or in the card of an export. They find
accidents: a flipped bit, a partial copy. Whoever edits a file on purpose can edit its hash too.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from fathoms.errors import WeightsError, reason
from fathoms.untrusted import MAX_CARD, read_json, sha256_of

# A header names each tensor in about 100 bytes. safetensors' own limit is 100 MB, which takes a gigabyte of
# memory to parse.
MAX_HEADER = 16 << 20


def check_ending(path: Path, name: str) -> None:
    """Refuse a file that is not there, or that is not safetensors by its name."""
    if not path.is_file():
        raise WeightsError(f"{name}: no such file; give a .safetensors file or hf-hub:OWNER/NAME")
    if path.suffix == ".safetensors":
        return
    if path.suffix in (".npz", ".npy", ".h5", ".msgpack"):
        raise WeightsError(
            f"{name}: arrays ({path.suffix}) are not read as weights; save them as .safetensors under timm's names"
        )
    raise WeightsError(
        f"{name}: only .safetensors files are opened, since others can run code when loaded; "
        "turn a .pth into one with `fathoms convert`"
    )


def check_header(path: Path, name: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a weights file; another kind of file or an inconsistent header is an error."""
    try:
        return {key: _shape(value) for key, value in _header(path, name).items() if key != "__metadata__"}
    except ValueError as error:
        raise _unreadable(name, reason(error)) from error


RECORD = "fathoms"
"""Entry of a header's metadata: the record of the model as JSON, so that a file alone says which model it is."""


def record_in_header(path: Path, name: str) -> dict[str, Any]:
    """What a weights file says of its model; empty where it says nothing, as files of other libraries."""
    metadata = _header(path, name).get("__metadata__")
    text = metadata.get(RECORD) if isinstance(metadata, dict) else None
    if text is None:
        return {}
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError("its record is not a JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        raise _unreadable(name, reason(error)) from error
    return record


def _header(path: Path, name: str) -> dict[str, Any]:
    check_ending(path, name)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise _unreadable(name, f"its header of {length} bytes is not within the file's {size}")
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_unknown)
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        return header
    except (ValueError, RecursionError) as error:
        raise _unreadable(name, reason(error)) from error


def _unreadable(name: str, why: str) -> WeightsError:
    return WeightsError(f"{name}: not a readable safetensors file ({why}); fetch it again")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice in its header")
    return table


def _unknown(name: str) -> Any:
    raise ValueError(f"{name} in its header")


def _shape(entry: Any) -> tuple[int, ...]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError("an entry of its header has no shape")
    return tuple(shape)


MANIFEST = "manifest.json"
# A manifest lists a handful of files.
_MAX = {MANIFEST: 1 << 20}


def check_recorded_hash(path: Path, name: str) -> None:
    """Refuse a file, called `name` in errors, that is not what was saved; without a record nothing is checked."""
    for record, wanted in _records(path):
        if wanted is None:
            raise WeightsError(
                f"{name}: {record} does not list it, so it was not saved here; move it out of this folder"
            )
        if sha256_of(path) != wanted:
            raise WeightsError(
                f"{name}: damaged or replaced: it is not what was saved (its sha256 differs from that in "
                f"{record}); use another checkpoint, or copy this one again"
            )


def _records(path: Path) -> list[tuple[str, Any]]:
    """The name of each record of a file, and the hash in it; None where the record does not list the file."""
    found = []
    manifest, card = path.with_name(MANIFEST), path.with_name(f"{path.name}.json")
    if manifest.is_file():
        found.append((MANIFEST, _read(manifest).get(path.name)))
    if card.is_file() and isinstance(recorded := _read(card).get("sha256"), str):
        found.append((card.name, recorded))
    return found


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, WeightsError, _MAX.get(path.name, MAX_CARD))
