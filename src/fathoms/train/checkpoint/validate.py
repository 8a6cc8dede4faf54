"""Validate an untrusted checkpoint before a run resumes from it.

The hashes of a manifest find accidents. Whoever edits a file can also edit its hash, so the types and ranges of
state.json are checked too.
"""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path
from typing import Any

from fathoms.errors import WeightsError
from fathoms.files.untrusted import read_json
from fathoms.train.checkpoint.migrate import RENAMED_IN_3, check_version
from fathoms.train.guard.policy import GUARD_COUNTS
from fathoms.train.precision.speed import LAUNCHES, PRECISIONS, SCOPES

NEEDED = ("state.json", "model.safetensors")
# Above any count of a run, below what would overflow a tensor's index.
_MOST = 10**15


def read_manifest(folder: Path, name: str) -> dict[str, str]:
    """The hash of each file of a checkpoint; `ValueError` if a file is extra or not a regular file."""
    if not (folder / name).exists():
        raise FileNotFoundError(2, "missing", str(folder / name))
    try:
        manifest = read_json(folder / name, WeightsError)
    except WeightsError as error:
        raise ValueError(str(error)) from error
    listed = {*manifest, *NEEDED}
    for path in folder.iterdir():
        if path.name != name and path.name not in manifest:
            raise ValueError(f"{path.name} is not in the manifest")
    for entry in sorted(listed):
        if Path(entry).name != entry or not isinstance(manifest.get(entry, ""), str):
            raise ValueError(f"{entry[:80]!r} is not a file name with a hash")
        if not (folder / entry).exists():
            raise FileNotFoundError(2, "missing", str(folder / entry))
        if not stat.S_ISREG((folder / entry).lstat().st_mode):
            raise ValueError(f"{entry} is not a regular file")
    return manifest


def check_state(state: dict[str, Any], where: str) -> None:
    """Check the types and ranges of state.json, and that its names stay inside the run folder."""
    version = check_version(state.get("version"), where)
    older = {} if version > 2 else {new: old for old, new in RENAMED_IN_3.items()}
    for key in ("epoch", older.get("batch", "batch"), "updates"):
        _expect(_is_count(state.get(key)), where, key)
    seconds = state.get("seconds")
    _expect(_is_number(seconds) and 0 <= seconds < _MOST, where, "seconds")  # pyrefly: ignore
    rows: Any = state.get("sums") if version > 1 else [state.get("sums")]
    _expect(isinstance(rows, list) and len(rows) > 0 and all(map(_is_sums, rows)), where, "sums")
    if version > 1:
        _expect(_is_count(state.get("world")) and state["world"] == len(rows), where, "world")
        batches = older.get("batches_per_epoch", "batches_per_epoch")
        _expect(_is_count(state.get(batches)), where, batches)
        _expect(state.get("guard") is not None, where, "guard")
    for key in ("best", "last"):
        value = state.get(key)
        _expect(value is None or (isinstance(value, dict) and _is_number(value.get("top1"))), where, key)
    _expect(state.get("best") is None or _is_count(state["best"].get("epoch")), where, "best.epoch")
    for key in ("identity", "optimizer", "scaler", "lines"):
        _expect(isinstance(state.get(key), dict), where, key)
    _expect(isinstance(state["identity"].get("recipe"), dict), where, "identity.recipe")
    _expect(isinstance(state["identity"].get("config"), dict | None), where, "identity.config")
    for key in ("parameters", "numbers"):
        _expect(isinstance(state["optimizer"].get(key), dict), where, f"optimizer.{key}")
    _expect(isinstance(state["optimizer"].get("optimizer"), str), where, "optimizer.optimizer")
    scale = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    _expect(
        not state["scaler"] or all(_is_number(state["scaler"].get(key)) for key in scale), where, "scaler"
    )
    _expect(isinstance(state.get("data"), str), where, "data")
    if version > 3:
        _check_speed(state, where)
    if version > 4:
        _check_facts(state, where)
    _check_guard(state.get("guard"), where)
    for name, length in state["lines"].items():
        # The file is cut to this length: a name with a path in it would cut somebody else's file.
        _expect(
            re.fullmatch(r"[a-z]+\.jsonl", name) is not None and _is_count(length), where, f"lines.{name}"
        )


def _check_speed(state: dict[str, Any], where: str) -> None:
    """Check the settings that the run resumes with."""
    _expect(isinstance(state.get("speed"), dict), where, "speed")
    speed = state["speed"]
    for key, names in {"precision": PRECISIONS, "compile_scope": SCOPES, "launch": LAUNCHES}.items():
        _expect(speed.get(key) in names, where, f"speed.{key}")
    backend = speed.get("torchcompile")
    _expect(isinstance(backend, str) and re.fullmatch(r"[\w.-]{1,100}", backend) is not None, where, "speed")
    device = state.get("device")
    _expect(isinstance(device, str | None) and len(device or "") <= 200, where, "device")


def _check_facts(state: dict[str, Any], where: str) -> None:
    """Check what the summary tells of earlier processes."""
    bad, peak, last = state.get("bad_images"), state.get("peak_memory"), state.get("last")
    texts = isinstance(bad, dict) and all(isinstance(reason, str) for reason in bad.values())
    _expect(texts, where, "bad_images")
    _expect(peak is None or _is_count(peak), where, "peak_memory")
    _expect(last is None or last.get("epoch") is None or _is_count(last["epoch"]), where, "last.epoch")


def _check_guard(guard: Any, where: str) -> None:
    """Check the guard's counters, which version 1 does not have."""
    if guard is None:
        return
    _expect(isinstance(guard, dict), where, "guard")
    for key in GUARD_COUNTS:
        _expect(_is_count(guard.get(key)), where, f"guard.{key}")
    for key in ("passed_over", "losses"):
        value = guard.get(key)
        _expect(isinstance(value, list) and all(map(_is_number, value)), where, f"guard.{key}")


def _expect(fits: bool, where: str, key: str) -> None:
    if not fits:
        raise WeightsError(
            f"{where}/state.json: {key[:80]} is not what a run writes there; the checkpoint cannot be used"
        )


def _is_sums(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
