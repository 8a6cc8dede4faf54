"""Checkpoints: safetensors and JSON in a folder that is complete or not there, with a hash of every file.

`checkpoints/last` is the newest, `checkpoints/previous` the one before it, `checkpoints/best` the best so
far. A folder is written under another name, flushed and renamed; whatever moment the process dies at, one
of `last` and `previous` is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from fathoms.atomic import sync_folder
from fathoms.errors import WeightsError
from fathoms.train.run_folder import dumps
from fathoms.train.versions import VERSION, bring_up

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on: named tensors by file, and plain values."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a new folder, its manifest last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, tensors in checkpoint.tensors.items():
        whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        save_file(whole, folder / f"{name}.safetensors", metadata={"format": "pt"})
    (folder / "state.json").write_text(dumps({**checkpoint.state, "version": VERSION}) + "\n")
    files = sorted(path for path in folder.iterdir())
    (folder / MANIFEST).write_text(dumps({path.name: _sha256(path) for path in files}) + "\n")
    for path in folder.iterdir():
        _flush(path)
    sync_folder(folder)


def save(checkpoints: Path, checkpoint: Checkpoint) -> None:
    """Make a checkpoint `last`; what was last becomes `previous`."""
    fresh = checkpoints / ".last.tmp"
    write(fresh, checkpoint)
    _put(fresh, checkpoints / "last", checkpoints / "previous")


def keep_as_best(checkpoints: Path) -> None:
    """Make `last` also `best`: the same files under a second name, so nothing is written twice."""
    fresh, behind = checkpoints / ".best.tmp", checkpoints / ".best.old"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(checkpoints / "last", fresh, copy_function=os.link)
    _put(fresh, checkpoints / "best", behind)
    shutil.rmtree(behind, ignore_errors=True)


def _put(fresh: Path, target: Path, behind: Path) -> None:
    """Rename `fresh` to `target`; what stood there moves to `behind`."""
    shutil.rmtree(behind, ignore_errors=True)
    if target.exists():
        target.rename(behind)
    fresh.rename(target)
    sync_folder(target.parent)


def why_unusable(folder: Path) -> str | None:
    """The reason why a folder is no whole checkpoint, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, digest in manifest.items():
            if Path(name).name != name:
                return f"{name!r} is no file name"
            if _sha256(folder / name) != digest:
                return f"{name} is not what was saved"
    except FileNotFoundError as error:
        return f"{Path(error.filename or folder).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return " ".join(str(error).split())
    return None


def read(folder: Path) -> Checkpoint:
    """A checkpoint that verifies; anything else is an error."""
    reason = why_unusable(folder)
    if reason:
        raise WeightsError(f"{folder}: not a whole checkpoint: {reason}")
    state = json.loads((folder / "state.json").read_text())
    state = bring_up(state, str(folder))
    try:
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{folder}: {' '.join(str(error).split())}") from error
    return Checkpoint(tensors, state)


def newest(checkpoints: Path) -> Path | None:
    """The newest whole checkpoint, or None where there is none; a damaged one is passed over aloud."""
    for name in ("last", "previous"):
        folder = checkpoints / name
        if not folder.is_dir():
            continue
        reason = why_unusable(folder)
        if reason is None:
            return folder
        warnings.warn(f"{folder}: damaged ({reason}); looking at the one before it", stacklevel=2)
    if (checkpoints / "last").is_dir():
        raise WeightsError(f"{checkpoints}: no checkpoint is whole; start anew with --resume never")
    return None
