"""The recorded hash of a file: in the manifest of its checkpoint folder, or in the card of its export.

Hashes find accidents: a flipped bit, a partial copy. Whoever edits a file on purpose can edit its hash too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fathoms.errors import WeightsError
from fathoms.files.untrusted import MAX_CARD, read_json, sha256_of

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
