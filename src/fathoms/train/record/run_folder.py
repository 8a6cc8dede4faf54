"""The run folder: config, metrics, checkpoints and summary of one run. Everything after training reads it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fathoms.errors import ConfigError, FathomsError
from fathoms.files.atomic import write_atomic
from fathoms.files.strict_json import finite
from fathoms.files.untrusted import read_json
from fathoms.train.record.environment import environment
from fathoms.train.record.toml import to_toml

FORMAT = 2
"""Version of summary.json and of the rows of the .jsonl files. Version 1, without a number, counts epochs from 0."""
FAILED = 2
"""Exit code of a run that failed for a reason outside it."""
DIVERGED = 3
"""Exit code of a run whose loss or gradient stopped being finite."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run: its summary, as in summary.json, and the exit code."""

    summary: dict[str, Any]
    code: int


def plain(value: Any) -> Any:
    """A value as strict JSON allows it: None for NaN and infinity, lists for tuples."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else finite(value)


def dumps(value: Any) -> str:
    """One line of strict JSON."""
    return json.dumps(plain(value), allow_nan=False)


class RunFolder:
    """`OUTPUT/NAME/` with its config, metrics, checkpoints and summary; locked by one process at a time.

    Args:
        path: The folder.
        writes: Whether this rank writes; the others only read.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self._lock: TextIO | None = None
        self._made: list[Path] = []

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def open(self) -> None:
        """Create the folder and lock it; one that cannot be written is an error at once."""
        if not self.writes:
            return
        try:
            refuse_links(self.path)
            refuse_comparison(self.path)
            self._made = [place for place in (self.path, *self.path.parents) if not place.exists()]
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(
                f"{self.path}: another run holds this folder; choose another --experiment"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be written ({error.strerror}); choose another --output"
            ) from error

    def discard(self) -> None:
        """Remove the folder of a run that was refused before it had anything to keep."""
        begun = self.length("metrics.jsonl") or (
            self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        )
        if not self._made or begun:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for place in self._made[1:]:
            # Another run may have put its folder there meanwhile.
            with suppress(OSError):
                place.rmdir()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_config(self, table: dict[str, Any], resumed: bool = False) -> None:
        """Write config.toml with every field, and environment.json, which keeps the earlier starts of a run."""
        if self.writes:
            with self._naming_the_folder():
                write_atomic(self.path / "config.toml", to_toml(table).encode())
                path = self.path / "environment.json"
                before = read_json(path, ConfigError) if resumed and path.is_file() else None
                write_atomic(path, dumps(environment(before)).encode() + b"\n")

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add one line to a .jsonl file, with the version of its format."""
        if self.writes:
            with self._naming_the_folder(), (self.path / name).open("a") as file:
                file.write(dumps({"version": FORMAT, **row}) + "\n")

    @contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        """Turn an error of the disk into one line with the folder's name."""
        try:
            yield
        except OSError as error:
            what = f"cannot be written ({error.strerror}); fix it"
            if not self.path.is_dir():
                what = "cannot save: the folder is gone; restore it"
            raise FathomsError(f"{self.path}: {what} and give the same command again") from error

    def length(self, name: str) -> int:
        """Bytes of a .jsonl file so far."""
        path = self.path / name
        return path.stat().st_size if path.is_file() else 0

    def cut(self, name: str, length: int) -> None:
        """Drop the lines of a .jsonl file after byte `length`; the resumed run writes them again."""
        if self.writes and self.length(name) > length:
            os.truncate(self.path / name, length)

    def sync(self) -> None:
        """Flush the .jsonl files to the disk, before a checkpoint that records their lengths."""
        for path in self.path.glob("*.jsonl"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def write_split(self, split: dict[str, Any] | None) -> None:
        """Write split.json: which training images are val; nothing where the data came with a val split."""
        if self.writes and split is not None:
            with self._naming_the_folder():
                write_atomic(self.path / "split.json", dumps(split).encode() + b"\n")

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a file of strict JSON, with the version of its format."""
        if self.writes:
            with self._naming_the_folder():
                write_atomic(self.path / name, dumps({"version": FORMAT, **value}).encode() + b"\n")

    def write_correct(self, correct: bytes) -> None:
        """Write correct.bits: a bit for each held-out image, 1 if it was classified correctly."""
        if self.writes:
            with self._naming_the_folder():
                write_atomic(self.path / "correct.bits", correct)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        if self.writes:
            with self._naming_the_folder():
                write_atomic(
                    self.path / "summary.json", json.dumps(plain(summary), indent=1).encode() + b"\n"
                )


def refuse_links(folder: Path) -> None:
    """Refuse a run folder that contains links or devices: through a link, a run would write somewhere else."""
    if not folder.is_dir():
        return
    for path in (*folder.iterdir(), *folder.glob("checkpoints/*"), *folder.glob("checkpoints/*/*")):
        if _is_odd(path):
            raise ConfigError(
                f"{path}: is a link or a device, and a run folder holds plain files; remove it, "
                "or choose another --output"
            )


def refuse_comparison(folder: Path) -> None:
    """Refuse the folder of a comparison, whose files have the names of a run's."""
    if any((folder / name).exists() for name in ("plan.json", "cells")):
        raise ConfigError(f"{folder}: holds a comparison, not a run; choose another --experiment")


def _is_odd(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        # The run that holds this folder has just renamed it; the lock will report that.
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
