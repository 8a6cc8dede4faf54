"""Tuning of each arm before its seeds: the same grid and the same trials for all, measured on val, never on test."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathoms.compare.cells import Cell, make_cell
from fathoms.compare.folder import MAX_FILE, REMOVE, VERSION, ComparisonFolder
from fathoms.compare.plan import JOINT
from fathoms.errors import ConfigError
from fathoms.files.jsonl import epoch_of, read_lines
from fathoms.files.untrusted import read_json
from fathoms.train.job import Job

FIRST_SEED = 1000
"""Seed of the trials; apart from those of the final runs, which are counted from 0."""


@dataclass(frozen=True)
class Trial:
    """One choice of values for one arm, and the run that tries it."""

    arm: str
    choice: Mapping[str, str]
    cell: Cell


@dataclass(frozen=True)
class Tuning:
    """A grid that is tried for every arm.

    Args:
        grid: Option names and the values to try.
        epochs: Epochs of a trial; None for those of a run.
        job: The run of an arm, or of a trial of it, by its name and its settings.
    """

    grid: Mapping[str, Sequence[str]]
    epochs: int | None
    job: Callable[[str, Mapping[str, str]], Job]

    def choices(self) -> list[dict[str, str]]:
        """Every combination of the grid's values."""
        names = list(self.grid)
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*self.grid.values())]

    def trials(
        self, arms: Mapping[str, Mapping[str, str]], fingerprint: str, folder: ComparisonFolder
    ) -> list[Trial]:
        """The trials of all arms."""
        shorter = {} if self.epochs is None else {"epochs": str(self.epochs)}
        made: list[Trial] = []
        for (arm, settings), choice in itertools.product(arms.items(), self.choices()):
            tried = {**settings, **choice}
            name = JOINT.join([arm, *(f"{key}={value}" for key, value in choice.items())])
            job = self.job(name, {**tried, **shorter})
            cell = make_cell(name, tried, FIRST_SEED, job, fingerprint, folder.tuning)
            made.append(Trial(arm, choice, dataclasses.replace(cell, test=False)))
        return made


def choose(trials: Sequence[Trial], folder: ComparisonFolder, metric: str) -> list[dict[str, Any]]:
    """For each arm its trials and the best choice on val; of equal ones the first, None where none has a score."""
    found: list[dict[str, Any]] = []
    for arm in dict.fromkeys(trial.arm for trial in trials):
        rows = [_row(trial, folder) for trial in trials if trial.arm == arm]
        scored = [row for row in rows if row["status"] == "done" and row[metric] is not None]
        sign = 1 if metric == "top1" else -1
        best = max(scored, key=lambda row: sign * row[metric])["choice"] if scored else None
        edge = [] if best is None else _edges(best, [row["choice"] for row in rows])
        # A trial that ended with an error tells nothing of its values, unlike one that diverged.
        failed = [row["choice"] for row in rows if row["status"] == "failed"]
        found.append({"name": arm, "best": best, "edge": edge, "failed": failed, "trials": rows})
    return found


def chosen_before(folder: ComparisonFolder) -> list[dict[str, Any]]:
    """The arms of tuning.json with what was chosen for them; none where it is not there."""
    path = folder.path / "tuning.json"
    arms = read_json(path, ConfigError, MAX_FILE, REMOVE).get("arms") if path.is_file() else []
    if not isinstance(arms, list) or not all(
        isinstance(arm, dict) and isinstance(arm.get("best", 0), dict | None) for arm in arms
    ):
        raise ConfigError(f"{path}: damaged (arms); {REMOVE}")
    return [{"name": "", "edge": [], "failed": [], "trials": [], **arm} for arm in arms]


def _row(trial: Trial, folder: ComparisonFolder) -> dict[str, Any]:
    """One trial: its last evaluation on val, and val by epoch."""
    status, cell = folder.status(trial.cell), trial.cell
    last = status.get("last") or {}
    return {
        "choice": dict(trial.choice),
        "seed": cell.seed,
        "status": status.get("status", "pending"),
        "reason": status.get("reason"),
        "top1": last.get("top1"),
        "loss": last.get("loss"),
        "curve": _curve(cell.folder),
        "run": str(cell.folder.relative_to(folder.path)),
    }


def _curve(run: Path) -> list[dict[str, Any]]:
    return [
        {"epoch": int(epoch_of(row)), "top1": row.get("top1"), "loss": row.get("loss")}
        for row in read_lines(run / "metrics.jsonl")
        if row.get("split") == "val"
    ]


def _edges(best: Mapping[str, str], choices: Sequence[Mapping[str, str]]) -> list[str]:
    """Options whose best value is the least or the greatest of the grid, where values are numbers."""
    edges: list[str] = []
    for name, value in best.items():
        try:
            numbers = [float(choice[name]) for choice in choices]
        except ValueError:
            continue
        if float(value) in (min(numbers), max(numbers)):
            edges.append(name)
    return edges


def tuning_file(found: Sequence[Mapping[str, Any]], tuning: Tuning, metric: str) -> str:
    """tuning.json: the grid, and each arm's trials with their curves."""
    table = {
        "version": VERSION,
        "metric": metric,
        "split": "val",
        "grid": {name: list(values) for name, values in tuning.grid.items()},
        "epochs": tuning.epochs,
        "arms": list(found),
    }
    return json.dumps(table, indent=1) + "\n"


def tuning_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The chosen values, a line an arm; a best value at the edge of the grid and trials that failed are named."""
    lines: list[str] = []
    for arm in found:
        lost = [_written(choice) for choice in arm["failed"]]
        failed = f"; tried in vain, since the run failed: {' and '.join(lost)}" if lost else ""
        if arm["best"] is None:
            said = "no trial has a score; it keeps the settings of all arms"
            lines.append(f"tuning {arm['name']}: {said}{failed}")
            continue
        chosen = _written(arm["best"])
        edge = (
            f"; {', '.join(arm['edge'])} is at the edge of the grid; a wider one may do better"
            if arm["edge"]
            else ""
        )
        lines.append(f"tuning {arm['name']}: {chosen}{edge}{failed}")
    return lines


def _written(choice: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in choice.items())
