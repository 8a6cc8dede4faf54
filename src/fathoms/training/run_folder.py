"""The run folder: config, origin, metrics, checkpoints and summary of one run. Everything after training reads it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fathoms.errors import ConfigError, FathomsError
from fathoms.files import finite, open_own, write_atomic
from fathoms.machine import command_words, usable_cores
from fathoms.text_table import plural
from fathoms.untrusted import read_json

if TYPE_CHECKING:
    import torch


def to_toml(table: dict[str, Any]) -> str:
    """A table as TOML text: plain values first, then sub-tables; None is left out."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in table.items() if _is_plain(value)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", to_toml(value).rstrip()]
    return "\n".join(lines) + "\n"


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, dict)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(
            character if character.isprintable() and character not in '"\\' else f"\\U{ord(character):08x}"
            for character in value
        )
        return f'"{escaped}"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)


PACKAGE = Path(__file__).parents[1]
PACKAGES = ("fathoms", "torch", "triton", "numpy", "timm", "torchvision", "safetensors")
MOST_STARTS = 50
"""Starts that are kept of a run that is resumed again and again: the first and the latest."""


def environment(before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Versions, commits and machine of this process, and every start of the run."""
    import torch

    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    earlier = (before or {}).get("starts")
    starts = [*(earlier if isinstance(earlier, list) else []), _start()]
    if len(starts) > MOST_STARTS:
        starts = [starts[0], *starts[1 - MOST_STARTS :]]
    found = torch.cuda.is_available()
    ours, project = _commit(PACKAGE, "__init__.py"), _commit(Path.cwd())
    return {
        "version": 2,
        "python": platform.python_version(),
        "versions": versions,
        "commit": ours,
        # The repository that the command was given in, where that is another one.
        "project_commit": None if project == ours else project,
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory": _memory(),
        "gpu": torch.cuda.get_device_name() if found else None,
        "gpu_memory": torch.cuda.get_device_properties(0).total_memory if found else None,
        "starts": starts,
    }


def describe_device(device: torch.device) -> str:
    """The device of a run and the threads of this process, in a line."""
    import torch

    threads = f"{plural(torch.get_num_threads(), 'thread')} on {plural(usable_cores(), 'core')}"
    if device.type != "cuda":
        return f"{device}, {threads}"
    memory = torch.cuda.get_device_properties(device).total_memory
    return f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB; on the host {threads}"


def _start() -> dict[str, Any]:
    """Time, machine, folder and command of this process; no command where Python code or a comparison trains."""
    words = command_words()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "folder": str(Path.cwd()),
        "command": ["fathoms", *words] if words[:1] == ("train",) else None,
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _commit(folder: Path, tracked: str | None = None) -> str | None:
    """The commit of a folder's repository, marked where its files have changed since; None outside of one.

    With `tracked`, None unless the repository holds that file: a package installed inside of a project's folder
    does not have the project's commit.
    """
    if tracked is not None and _git(folder, "ls-files", "--error-unmatch", tracked) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return f"{commit} with local changes" if _git(folder, "status", "--porcelain", "-uno") else commit


def _git(folder: Path, *words: str) -> str | None:
    """Output of a git command; None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


FORMAT = 2
"""Version of summary.json and of the rows of the .jsonl files."""
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
    """`OUTPUT/NAME/` with its config, metrics, checkpoints and summary; locked by one process at a time."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self._lock: IO[Any] | None = None
        self._made: list[Path] = []

    @property
    def checkpoints(self) -> Path:
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
            self._lock = lock = open_own(self.path / ".lock", "a")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_config(self, table: dict[str, Any], resumed: bool = False) -> None:
        """Write config.toml with every field, and environment.json, which keeps the earlier starts of a run."""
        if self.writes:
            self.write("config.toml", to_toml(table))
            path = self.path / "environment.json"
            before = read_json(path, ConfigError) if resumed and path.is_file() else None
            self.write(path.name, dumps(environment(before)) + "\n")

    def write(self, name: str, data: str | bytes) -> None:
        """Write a file whole, on the rank that writes."""
        if self.writes:
            with self._naming_the_folder():
                write_atomic(self.path / name, data.encode() if isinstance(data, str) else data)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add one line to a .jsonl file, with the version of its format."""
        if self.writes:
            with self._naming_the_folder(), open_own(self.path / name, "a") as file:
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
            with open_own(self.path / name, "r+b") as file:
                file.truncate(length)

    def sync(self) -> None:
        """Flush the .jsonl files to the disk, before a checkpoint that records their lengths."""
        for path in self.path.glob("*.jsonl"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def write_split(self, split: dict[str, Any] | None) -> None:
        """Write split.json: which training images are val; nothing where the data came with a val split."""
        if split is not None:
            self.write("split.json", dumps(split) + "\n")

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a file of strict JSON, with the version of its format."""
        self.write(name, dumps({"version": FORMAT, **value}) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.write("summary.json", json.dumps(plain(summary), indent=1) + "\n")


def refuse_links(folder: Path) -> None:
    """Refuse a run folder that contains links or devices: through a link, a run would write somewhere else."""
    inside = [path for depth in ("*", "checkpoints/*", "checkpoints/*/*") for path in folder.glob(depth)]
    for path in [folder] if folder.is_symlink() else inside:
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
