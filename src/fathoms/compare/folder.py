"""The comparison folder: its plan, the run folders of its cells, and the results gathered from them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathoms.atomic import write_atomic
from fathoms.compare.cells import ENDED, Cell
from fathoms.errors import ConfigError
from fathoms.untrusted_files import read_json

VERSION = 1
MAX_FILE = 64 << 20


@dataclass(frozen=True)
class Settings:
    """All of a comparison that is fixed before its first run.

    Args:
        command: The words after `fathoms`, as the user typed them.
        base: Every setting that all arms share.
        data: Where the data was; its fingerprint decides.
        fingerprint: Of the data.
        images: Images that are held out.
        classes: Number of classes.
        metric: top1 or loss.
        margin: The smallest difference that matters, in the metric's unit.
        floor: Deviation over seeds that the size of the held-out set lets expect, in the metric's unit.
        baseline: The arm that all others are compared with; None compares all pairs.
        paired: Whether runs of a seed start from the same weights.
    """

    command: tuple[str, ...]
    base: dict[str, Any]
    data: str
    fingerprint: str
    images: int
    classes: int
    metric: str
    margin: float
    floor: float
    baseline: str | None
    paired: bool


class ComparisonFolder:
    """`OUTPUT/NAME/` of a comparison; one process at a time writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def cells(self) -> Path:
        """Where the run folders are."""
        return self.path / "cells"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; a second comparison in it is an error."""
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
            with (self.path / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield
        except BlockingIOError as error:
            raise ConfigError(
                f"{self.path}: another comparison holds this folder; choose another --experiment"
            ) from error

    def plan(self) -> dict[str, Any] | None:
        """The plan so far; None in a new folder."""
        path = self.path / "plan.json"
        if not path.is_file():
            if (self.path / "config.toml").is_file():
                raise ConfigError(f"{self.path}: holds a run, not a comparison; choose another --experiment")
            return None
        return read_json(path, ConfigError, MAX_FILE)

    def begin(self, settings: Settings, arms: Mapping[str, Mapping[str, str]], seeds: int) -> dict[str, Any]:
        """Write the plan, joined with that of earlier commands; what is then planned.

        What the verdicts rest on (metric, margin, baseline) stays as it was before the first run.
        """
        now: dict[str, Any] = {**vars(settings), "command": list(settings.command)}
        now |= {
            "version": VERSION,
            "arms": {name: dict(table) for name, table in arms.items()},
            "seeds": seeds,
        }
        before = self.plan()
        if before is None:
            plan = {**now, "grown": []}
        else:
            self._refuse_other(before, now)
            plan = _grown(before, now)
        write_atomic(self.path / "plan.json", json.dumps(plan, indent=1).encode() + b"\n")
        return plan

    def _refuse_other(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        if before.get("version") != VERSION:
            raise ConfigError(f"{self.path}: its plan has version {before.get('version')!r}, not {VERSION}")
        for key in ("base", "fingerprint", "metric", "margin", "baseline", "paired"):
            if before.get(key) != now[key]:
                what = _first_difference(before.get(key), now[key])
                raise ConfigError(
                    f"{self.path}: holds another comparison ({key}: {what}); choose another --experiment"
                )
        for name, table in now["arms"].items():
            if before["arms"].get(name, table) != table:
                raise ConfigError(f"{self.path}: arm {name!r} has other settings there; use another name")

    def status(self, cell: Cell) -> dict[str, Any]:
        """How far a cell is: its summary, or why it failed; {} if it was not begun or was cut."""
        path = cell.folder / "summary.json"
        summary = read_json(path, ConfigError, MAX_FILE) if path.is_file() else {}
        if summary.get("status") in ENDED:
            return summary
        failed = cell.folder / "failed.json"
        return read_json(failed, ConfigError, MAX_FILE) if failed.is_file() else {}

    def note_failure(self, cell: Cell, reason: str) -> None:
        """Keep why a cell failed."""
        cell.folder.mkdir(parents=True, exist_ok=True)
        kept = json.dumps({"status": "failed", "reason": reason}).encode()
        write_atomic(cell.folder / "failed.json", kept + b"\n")

    def forget_failure(self, cell: Cell) -> None:
        """A cell is tried again."""
        (cell.folder / "failed.json").unlink(missing_ok=True)

    def prune(self, cell: Cell, keep: str) -> None:
        """Delete the checkpoints of an ended cell that nobody asked to keep."""
        checkpoints = cell.folder / "checkpoints"
        if keep == "all" or not checkpoints.is_dir():
            return
        for checkpoint in checkpoints.iterdir():
            if keep == "none" or checkpoint.name != "last":
                if checkpoint.is_symlink() or checkpoint.is_file():
                    checkpoint.unlink()
                else:
                    shutil.rmtree(checkpoint)

    def write(self, name: str, text: str) -> None:
        """One file of results, whole or not at all."""
        write_atomic(self.path / name, text.encode())


def _grown(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The earlier plan with the new command's arms and seeds."""
    new = [name for name in now["arms"] if name not in before["arms"]]
    arms = {**before["arms"], **now["arms"]}
    seeds = max(before["seeds"], now["seeds"])
    grown = list(before.get("grown", []))
    if new or seeds > before["seeds"]:
        grown.append({"command": now["command"], "arms": new, "seeds": seeds})
    return {**before, "data": now["data"], "arms": arms, "seeds": seeds, "grown": grown}


def _first_difference(before: Any, now: Any) -> str:
    """The first setting that differs, as "name old -> new"."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                return f"{key} {_first_difference(before.get(key), now.get(key))}"
    return f"{before!r} -> {now!r}"


def stale(cells: Sequence[Cell], folder: ComparisonFolder) -> list[Cell]:
    """The cells that are still to be run: not begun, cut, or failed."""
    return [cell for cell in cells if folder.status(cell).get("status") not in ENDED]
