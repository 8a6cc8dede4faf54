"""The run folder: everything after training reads it, and nothing else."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from fathoms.atomic import write_atomic
from fathoms.errors import ConfigError, FathomsError
from fathoms.train.checkpoint.validate import refuse_links
from fathoms.train.record.toml import to_toml


def plain(value: Any) -> Any:
    """A value as JSON takes it: no infinities, no tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def dumps(value: Any) -> str:
    """One line of strict JSON."""
    return json.dumps(plain(value), allow_nan=False)


class RunFolder:
    """`OUTPUT/NAME/` with its config, metrics, checkpoints and summary; held by one process at a time."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self._lock: TextIO | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    def open(self) -> None:
        """Create the folder and hold its lock; a folder that cannot be written is an error at once."""
        if not self.writes:
            return
        try:
            refuse_links(self.path)
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

    def close(self) -> None:
        """Let the lock go."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_config(self, table: dict[str, Any]) -> None:
        """config.toml with every field, and environment.json."""
        if self.writes:
            with self._telling():
                write_atomic(self.path / "config.toml", to_toml(table).encode())
                write_atomic(self.path / "environment.json", dumps(environment()).encode() + b"\n")

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add one line to a .jsonl file."""
        if self.writes:
            with self._telling(), (self.path / name).open("a") as file:
                file.write(dumps(row) + "\n")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What the disk says, in one line."""
        try:
            yield
        except OSError as error:
            raise FathomsError(
                f"{self.path}: cannot be written ({error.strerror}); mend it and give the same command again"
            ) from error

    def length(self, name: str) -> int:
        """Bytes of a .jsonl file so far."""
        path = self.path / name
        return path.stat().st_size if path.is_file() else 0

    def cut(self, name: str, length: int) -> None:
        """Forget the lines of a .jsonl file behind byte `length`: the resumed run writes them again."""
        if self.writes and self.length(name) > length:
            os.truncate(self.path / name, length)

    def sync(self) -> None:
        """Put the .jsonl files on the disk, before a checkpoint that counts on them."""
        for path in self.path.glob("*.jsonl"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """summary.json."""
        if self.writes:
            with self._telling():
                write_atomic(
                    self.path / "summary.json", json.dumps(plain(summary), indent=1).encode() + b"\n"
                )


def environment() -> dict[str, Any]:
    """What the run depends on besides its config: versions, commit, machine."""
    import torch

    packages = ("fathoms", "torch", "triton", "numpy", "timm", "torchvision", "safetensors")
    versions: dict[str, str] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": gpu,
    }


def _commit() -> str | None:
    """The commit of the working folder, where git knows one."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None
