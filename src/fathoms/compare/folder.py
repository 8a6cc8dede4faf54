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

from fathoms.compare.cells import ENDED, Cell
from fathoms.errors import ConfigError
from fathoms.files.atomic import write_atomic
from fathoms.files.untrusted import read_json

VERSION = 1
MAX_FILE = 64 << 20
REMOVE = "remove the file, and the command of the comparison writes it again"
REMOVE_PLAN = "remove the file, and a command with all arms and seeds of the comparison writes it again"
NAMES = {"margin": "--smallest-difference"}
"""Settings of a plan that are not named as their flags are."""


@dataclass(frozen=True)
class Settings:
    """All of a comparison that is fixed before its first run.

    Args:
        command: The words after `fathoms`, as the user typed them; none where Python code plans it.
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
        keep: Checkpoints of a finished run that stay: none, last or all.
        split: What scores are measured on: test, or val where the data has no test set.
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
    keep: str
    split: str


class ComparisonFolder:
    """`OUTPUT/NAME/` of a comparison; one process at a time writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def cells(self) -> Path:
        """Where the run folders are."""
        return self.path / "cells"

    @property
    def tuning(self) -> Path:
        """Where the run folders of tuning trials are."""
        return self.path / "tuning"

    @contextlib.contextmanager
    def locked(self, shard: tuple[int, int] = (1, 1)) -> Iterator[None]:
        """Hold the folder, or a shard of it; a second comparison in it is an error."""
        self.cells.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            whole = shard == (1, 1)
            try:
                self._lock(held, ".lock", fcntl.LOCK_EX if whole else fcntl.LOCK_SH)
                if not whole:
                    self._lock(held, f".lock-{shard[0]}-of-{shard[1]}", fcntl.LOCK_EX)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.path}: another comparison holds this folder; choose another --experiment"
                ) from error
            yield

    def _lock(self, held: contextlib.ExitStack, name: str, kind: int, wait: bool = False) -> None:
        file = held.enter_context((self.path / name).open("w"))
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the files that all shards write, the plan and the results; another shard waits for its turn."""
        with contextlib.ExitStack() as held:
            self._lock(held, ".lock-plan", fcntl.LOCK_EX, wait=True)
            yield

    def plan(self) -> dict[str, Any] | None:
        """The plan so far; None in a new folder."""
        path = self.path / "plan.json"
        if not path.is_file():
            if (self.path / "config.toml").is_file():
                raise ConfigError(f"{self.path}: holds a run, not a comparison; choose another --experiment")
            return None
        plan = read_json(path, ConfigError, MAX_FILE, REMOVE_PLAN)
        kinds = {"base": dict, "arms": dict, "keys": dict, "tune": dict, "seeds": int, "keep": str}
        for key, kind in kinds.items():
            if plan.get("version") == VERSION and not isinstance(plan.get(key), kind):
                raise ConfigError(f"{path}: damaged ({key} is missing or wrong); choose another --experiment")
        return plan

    def begin(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """Write the plan, joined with that of earlier commands; what is then planned.

        What the verdicts rest on (metric, margin, baseline) stays as it was before the first run.
        """
        with self.writing():
            before = self.plan()
            if before is not None:
                self.refuse_other(before, now)
            plan = {**now, "grown": []} if before is None else _grown(before, now)
            write_atomic(self.path / "plan.json", json.dumps(plan, indent=1).encode() + b"\n")
        return plan

    def refuse_other(self, before: Mapping[str, Any], now: Mapping[str, Any], changed_data: str = "") -> None:
        """Refuse a plan that does not continue the one that is there, by the first setting that differs.

        Args:
            before: The plan that is there.
            now: The one that is asked for.
            changed_data: The splits that differ, where the data do.
        """
        if before.get("version") != VERSION:
            raise ConfigError(f"{self.path}: its plan has version {before.get('version')!r}, not {VERSION}")
        what = _conflict(before["base"], now["base"])
        if what is None and before.get("fingerprint") != now["fingerprint"]:
            what = f"other data: {changed_data}" if changed_data else "other data"
        for key in ("metric", "margin", "baseline", "paired", "tune_epochs"):
            if what is None and before.get(key) != now[key]:
                old, new = (str(plan.get(key))[:16] for plan in (before, now))
                what = f"{NAMES.get(key, '--' + key.replace('_', '-'))} {old} -> {new}"
        changed = [name for name, key in before["keys"].items() if now["keys"].get(name, key) != key]
        for name, table in now["arms"].items():
            if before["arms"].get(name, table) != table:
                raise ConfigError(f"{self.path}: arm {name!r} has other settings there; use another name")
        if what is None and changed:
            what = f"arm {changed[0]!r} is another run there"
        if what is not None:
            raise ConfigError(f"{self.path}: holds another comparison ({what}); choose another --experiment")

    def status(self, cell: Cell) -> dict[str, Any]:
        """How far a cell is: its summary, or why it failed; {} if it was not begun or was cut."""
        path = cell.folder / "summary.json"
        summary = read_json(path, ConfigError, MAX_FILE, REMOVE) if path.is_file() else {}
        if summary.get("status") in ENDED:
            return summary
        failed = cell.folder / "failed.json"
        return read_json(failed, ConfigError, MAX_FILE, REMOVE) if failed.is_file() else {}

    def timings(self) -> dict[str, Any]:
        """timings.json of earlier commands; a damaged one is written anew."""
        try:
            found = read_json(self.path / "timings.json", ConfigError, MAX_FILE)
        except ConfigError:
            return {}
        return {name: row for name, row in found.items() if isinstance(row, dict)}

    def note_failure(self, cell: Cell, reason: str) -> None:
        """Keep why a cell failed."""
        cell.folder.mkdir(parents=True, exist_ok=True)
        kept = json.dumps({"status": "failed", "reason": reason}).encode()
        write_atomic(cell.folder / "failed.json", kept + b"\n")

    def forget_failure(self, cell: Cell) -> None:
        """A cell ended after all."""
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
    """The earlier plan with the new command's arms, seeds and values to tune; `grown` has what was added."""
    new = [name for name in now["arms"] if name not in before["arms"]]
    grown = list(before.get("grown", []))
    plan = {**before, **{key: now[key] for key in ("data", "base", "own", "split")}}
    plan["seeds"] = max(before["seeds"], now["seeds"])
    for key in ("arms", "keys", "tune"):
        plan[key] = {**before[key], **now[key]}
    if new or plan["seeds"] > before["seeds"] or plan["tune"] != before["tune"]:
        added = {"command": now["command"], "arms": new, "seeds": plan["seeds"], "tune": plan["tune"]}
        grown.append(added)
    return {**plan, "grown": grown}


def _conflict(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> str | None:
    """The first setting that both plans share among all their arms with different values, as "name old -> new"."""
    for key in sorted(before.keys() & now.keys()):
        old, new = before[key], now[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if inner := _conflict(old, new, f"{path}{key}."):
                return inner
        elif json.dumps(old) != json.dumps(new):
            return f"--{key.replace('_', '-')} {old!r} -> {new!r}"
    return None


def stale(cells: Sequence[Cell], folder: ComparisonFolder) -> list[Cell]:
    """The cells that are still to be run: not begun, cut, or failed."""
    return [cell for cell in cells if folder.status(cell).get("status") not in ENDED]
