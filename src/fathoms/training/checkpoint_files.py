"""Checkpoint folders on disk: safetensors and JSON, complete or absent, with a hash of every file.

`checkpoints/last` is the newest, `checkpoints/previous` the one before it, `checkpoints/update-N` older ones
where more are kept, `checkpoints/best` the best so far. A folder is written under another name, flushed and
renamed: whenever the process dies, one of `last` and `previous` is whole. Hashes find accidents; whoever edits a file
can also edit its hash, so the types and ranges of state.json are checked too.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathoms.errors import WeightsError, reason
from fathoms.files import open_own, sync_folder
from fathoms.models.weights_file import MANIFEST, RECORD
from fathoms.training.run_folder import dumps
from fathoms.untrusted import read_json, sha256_of

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

CHUNK = 8 << 20


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> str:
    """Write contiguous host tensors as safetensors, flush them to the disk, and return the SHA-256 of the file.

    `about` goes into the metadata of its header.

    The safetensors package copies every tensor and holds Python's lock while it writes, which would stop the training
    thread. The format is a length, a JSON header and the bytes.
    """
    # Wide types first, so that every tensor is aligned; the order of the safetensors package.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(about or {})}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        kind, shape = NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open_own(path, "wb", buffering=0) as file:
        pieces = [memoryview(struct.pack("<Q", len(text)) + text)]
        pieces += [_bytes(tensors[name]) for name in names]
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                part = piece[start : start + CHUNK]
                digest.update(part)
                while part:
                    part = part[file.write(part) or 0 :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


VERSION = 5
"""Version of state.json; another one is refused."""
NEEDED = ("state.json", "model.safetensors")


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


FRESH, FRESH_BEST, TRASH = ".last.tmp", ".best.tmp", ".trash-"
OLDER = "update-"
Warn = Callable[[str], Any]


@dataclass(frozen=True)
class Checkpoint:
    """The saved state of a run: named tensors by file, and the plain values of state.json."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def _write_text(path: Path, text: str) -> str:
    with open_own(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(text.encode()).hexdigest()


def _about(state: dict[str, Any]) -> dict[str, str] | None:
    """The record of a run's model for the headers of its weights; None of a module that Python code gave."""
    identity, classes = state.get("identity", {}), state.get("classes")
    if not isinstance(identity, dict) or "model" not in identity or "module" in identity or not classes:
        return None
    config = identity["config"] and {**identity["config"], "num_classes": len(classes)}
    told = {
        **{"model": identity["model"], "config": config, "classes": classes},
        **{"preprocessing": state.get("preprocessing"), "swap_norms": identity["swap_norms"]},
    }
    return {RECORD: dumps(told)}


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a new folder, its manifest last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    hashes: dict[str, str] = {}
    about = _about(checkpoint.state)
    for name, tensors in checkpoint.tensors.items():
        on_host = {key: value.detach().cpu() for key, value in tensors.items()}
        told = None if name == "optimizer" else about
        hashes[f"{name}.safetensors"] = write_tensors(folder / f"{name}.safetensors", on_host, told)
    values = {key: v.tolist() if isinstance(v, Tensor) else v for key, v in checkpoint.state.items()}
    hashes["state.json"] = _write_text(folder / "state.json", dumps({**values, "version": VERSION}) + "\n")
    _write_text(folder / MANIFEST, dumps(hashes) + "\n")
    sync_folder(folder)


def save(
    checkpoints: Path, checkpoint: Checkpoint, keep: int = 2, warn: Warn = warnings.warn, best: bool = False
) -> None:
    """Write a checkpoint as `last`, or as `last` and `best`; the old `last` becomes `previous`, and so on."""
    fresh, last, previous = checkpoints / FRESH, checkpoints / "last", checkpoints / "previous"
    try:
        write(fresh, checkpoint)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    # Where there is no room for `best`, `last` is still saved.
    no_best = _why_not_copied(fresh, checkpoints / FRESH_BEST) if best else None
    aside: list[Path] = []
    # After a kill between the two renames there is no `last`, and `previous` is all there is.
    if previous.exists() and last.exists():
        if keep > 2:
            older = checkpoints / f"{OLDER}{_updates(previous):08d}"
            # A signal right after a save, or a rollback, saves the same update once more.
            if older.exists():
                aside.append(_set_aside(older))
            previous.rename(older)
        else:
            aside.append(_set_aside(previous))
    if last.exists():
        last.rename(previous)
    fresh.rename(last)
    if best and no_best is None:
        aside += _name_best(checkpoints)
    sync_folder(checkpoints)
    if keep == 1 and previous.exists():
        aside.append(_set_aside(previous))
    aside += [_set_aside(folder) for folder in _older(checkpoints)[max(keep - 2, 0) :]]
    for folder in aside:
        _delete(folder, warn)
    if no_best is not None:
        raise no_best


def _set_aside(folder: Path) -> Path:
    """Rename a checkpoint out of the way, which is instant; its new path."""
    return folder.rename(folder.with_name(f"{TRASH}{secrets.token_hex(4)}"))


def _delete(folder: Path, warn: Warn) -> None:
    """Delete a folder that was set aside, which may take a while; warn where it cannot be deleted."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warn(f"{folder}: an old checkpoint cannot be deleted ({error.strerror}); delete it by hand")


def _name_best(checkpoints: Path) -> list[Path]:
    """Rename the new best into place; the old one, set aside."""
    best = checkpoints / "best"
    aside = [_set_aside(best)] if best.exists() else []
    (checkpoints / FRESH_BEST).rename(best)
    return aside


def make_room(checkpoints: Path, warn: Warn) -> None:
    """Delete all but `last` and `best`."""
    for folder in (*_older(checkpoints), checkpoints / "previous"):
        if folder.exists() and (checkpoints / "last").exists():
            _delete(_set_aside(folder), warn)


def _why_not_copied(folder: Path, target: Path) -> OSError | None:
    """Hard-link the files of a folder into another, so nothing is written twice; the error, if there is one."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        target.mkdir()
        for path in folder.iterdir():
            _link(path, target / path.name)
        sync_folder(target)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        return error
    return None


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        # Some file systems have no hard links.
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def drop_damaged(checkpoints: Path, whole: Path) -> None:
    """Delete damaged checkpoints newer than the newest whole one; the next save would keep them in its place."""
    for folder in (checkpoints / "last", checkpoints / "previous"):
        if folder == whole:
            return
        if folder.exists():
            _delete(_set_aside(folder), warnings.warn)


def clean_up(checkpoints: Path) -> None:
    """Remove the leftovers of a killed process; a new best that lacked only its name gets it."""
    if _is_copy(checkpoints / FRESH_BEST, checkpoints / "last"):
        for folder in _name_best(checkpoints):
            _delete(folder, warnings.warn)
    leftovers = [path for path in checkpoints.iterdir() if path.name.startswith((TRASH, FRESH, FRESH_BEST))]
    for path in leftovers:
        try:
            shutil.rmtree(path)
        except OSError as error:
            warnings.warn(
                f"{path}: a leftover cannot be deleted ({error.strerror}); delete it by hand", stacklevel=2
            )


def _is_copy(folder: Path, original: Path) -> bool:
    """Whether a folder is a complete copy of a checkpoint, by the hashes of its files."""
    if why_unusable(folder) is not None or not (original / MANIFEST).is_file():
        return False
    return (folder / MANIFEST).read_bytes() == (original / MANIFEST).read_bytes()


def _updates(folder: Path) -> int:
    """Updates done by a checkpoint; zero where its state cannot be read."""
    try:
        return int(json.loads((folder / "state.json").read_text())["updates"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _older(checkpoints: Path) -> list[Path]:
    """Checkpoints older than `previous`, the newest first."""
    return sorted(checkpoints.glob(f"{OLDER}*"), reverse=True)


def why_unusable(folder: Path) -> str | None:
    """The reason why a folder is not a whole checkpoint, or None."""
    try:
        for name, digest in read_manifest(folder, MANIFEST).items():
            if sha256_of(folder / name) != digest:
                return f"{name} is not what was saved"
    except FileNotFoundError as error:
        return f"{Path(error.filename or folder).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return reason(error)
    return None


def candidates(checkpoints: Path) -> list[Path]:
    """The checkpoints of a run that it may resume from, the newest first; not yet known to be whole."""
    folders = [checkpoints / "last", checkpoints / "previous", *_older(checkpoints)]
    return [folder for folder in folders if folder.is_dir()]


def newest(checkpoints: Path) -> Path | None:
    """The newest whole checkpoint, or None; a damaged one is skipped with a warning."""
    folders = candidates(checkpoints)
    for folder in folders:
        reason = why_unusable(folder)
        if reason is None:
            return folder
        warnings.warn(f"{folder}: damaged ({reason}); looking at the one before it", stacklevel=2)
    if folders:
        raise WeightsError(
            f"{checkpoints}: no checkpoint is whole; remove the folder or choose another --experiment"
        )
    return None
