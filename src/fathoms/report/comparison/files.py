"""Read a comparison, or any set of run folders, as plain values for its page. The files are untrusted."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError
from fathoms.files.jsonl import epoch_of
from fathoms.report.quantities import shown
from fathoms.report.run.files import RunRecord, listed, number, read_json_file, read_run, table
from fathoms.train.identity import POLICY

SCORED = ("done", "stalled")
"""Statuses of cells that count in the mean of their arm."""
REMOVE = "remove the file, and the command of the comparison writes it again"
"""Remedy for a damaged file of a comparison."""
NAMED_BY_OPTIONS = 4
"""Runs that differ in more options than this are named by their folders."""
BESIDE = {"data": None, "swap_norms": None, "initial_checkpoint": None, "initial_head": "load", **POLICY}
"""Settings of `Job.identity` beside model and recipe, with what a config.toml without them means; not the seed."""


@dataclass(frozen=True)
class CellRecord:
    """One run of an arm.

    Args:
        arm: The arm's name.
        options: The arm's settings.
        seed: Its seed, as text.
        status: done, stalled, diverged, failed, running or pending.
        top1: Accuracy in percent on the held-out images; None before the end.
        loss: Loss on them.
        reason: Why it ended early.
        record: The files of its run folder.
        timing: Its row of timings.json.
    """

    arm: str
    options: dict[str, str]
    seed: str
    status: str
    top1: float | None
    loss: float | None
    reason: str
    record: RunRecord
    timing: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def epoch(self) -> int:
        """Epochs done."""
        return max((int(epoch_of(row)) for row in self.record.metrics), default=0)

    @property
    def seconds(self) -> float | None:
        """Seconds of training."""
        return number(self.timing.get("training_seconds"), number(self.record.summary.get("seconds")))

    @property
    def memory(self) -> float | None:
        """Peak memory on the device, in bytes."""
        return number(self.timing.get("peak_memory"), number(self.record.summary.get("peak_memory")))

    @functools.cached_property
    def speed(self) -> float | None:
        """Images per second of the last epoch."""
        if (rate := number(self.timing.get("images_per_second"))) is not None:
            return rate
        rates = [rate for _, rate in self.record.series("train", "images_per_second") if rate is not None]
        return rates[-1] if rates else None

    def score(self, metric: str) -> float | None:
        """Its top1 or loss, if it counts in the mean."""
        return (self.top1 if metric == "top1" else self.loss) if self.status in SCORED else None


@dataclass(frozen=True)
class ComparisonRecord:
    """Cells with the plan and the results they belong to; both are empty for a set of runs."""

    name: str
    cells: list[CellRecord]
    plan: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The measure that decides: top1 or loss."""
        return "loss" if "loss" in (self.results.get("metric"), self.plan.get("metric")) else "top1"


def is_comparison(folder: Path) -> bool:
    """Whether a folder holds a comparison."""
    return (folder / "plan.json").is_file()


def run_folders(folder: Path) -> list[Path]:
    """The run folders that a folder stands for: itself, those of its cells, or those right below it."""
    if (folder / "config.toml").is_file():
        return [folder]
    inner = folder / "cells" if is_comparison(folder) else folder
    found = sorted(path.parent for path in inner.glob("*/config.toml")) if inner.is_dir() else []
    if not found and not is_comparison(folder):
        raise ConfigError(
            f"{folder}: is not a run folder, it has no config.toml; give a run folder, a comparison or a folder of runs"
        )
    return found


def unreadable_runs(folders: Sequence[Path]) -> list[str]:
    """The runs whose summary cannot be read, a line each: a page of several runs is made without them."""
    found: list[str] = []
    if len(folders) == 1 and (folders[0] / "config.toml").is_file() and not is_comparison(folders[0]):
        return found
    for path in dict.fromkeys(path for folder in folders for path in run_folders(folder)):
        try:
            read_json_file(path / "summary.json")
        except ConfigError as error:
            found.append(str(error))
    return found


def read_comparison(folder: Path) -> ComparisonRecord:
    """Read the folder of a comparison, also while its runs go on."""
    names = ("plan", "results", "timings", "tuning")
    plan, results, timings, tuning = (read_json_file(folder / f"{name}.json", REMOVE) for name in names)
    name = folder.resolve().name
    if not results:
        return ComparisonRecord(
            name, group_runs([_read(path) for path in run_folders(folder)]), plan, {}, tuning
        )
    cells = [
        _planned(table(row), folder / "cells", timings) for row in listed(results.get("cells")) if table(row)
    ]
    return ComparisonRecord(name, cells, plan, results, tuning)


def read_runs(folders: Sequence[Path]) -> ComparisonRecord:
    """Read any set of run folders; runs that differ in nothing but the seed form an arm."""
    paths = list(dict.fromkeys(path for folder in folders for path in run_folders(folder)))
    name = folders[0].resolve().name if len(folders) == 1 else f"{len(paths)} runs"
    return ComparisonRecord(name, group_runs([_read(path) for path in paths]))


def _planned(row: dict[str, Any], folder: Path, timings: dict[str, Any]) -> CellRecord:
    """The cell of a row of results.json; its folder lies in `folder`, whatever the row says."""
    name = Path(str(row.get("run", ""))).name or "?"
    record = _read(folder / name)
    status = str(row.get("status", "pending"))
    if status == "pending" and (record.metrics or record.config):
        status = "running"
    return CellRecord(
        arm=str(row.get("name", "?")),
        options={str(key): shown(value) for key, value in table(row.get("arm")).items()},
        seed=shown(row.get("seed", "?")),
        status=status,
        top1=number(row.get("top1")),
        loss=number(row.get("loss")),
        reason=str(row.get("reason") or record.summary.get("unreadable") or ""),
        record=record,
        timing=table(timings.get(name)),
    )


def _read(folder: Path) -> RunRecord:
    """The files of a run; one that is damaged or missing is kept, and says why."""
    try:
        return read_run(folder, light=True)
    except ConfigError as error:
        begun = (folder / "config.toml").is_file()
        return RunRecord(folder.name, {}, {"status": "failed", "unreadable": str(error)} if begun else {})


def group_runs(runs: Iterable[RunRecord]) -> list[CellRecord]:
    """Runs as cells: the settings in which they differ make the arms."""
    known = list(runs)
    flat = [_settings(run) for run in known]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    differing = [key for key in keys if len({settings.get(key) for settings in flat}) > 1]
    options = [{key: settings.get(key, "none") for key in differing} for settings in flat]
    names = [", ".join(f"{key}={value}" for key, value in own.items()) for own in options]
    names = [
        name or str(table(run.config.get("model")).get("name", "run"))
        for name, run in zip(names, known, strict=True)
    ]
    seeds = [shown(run.config.get("seed", "?")) for run in known]
    pairs = list(zip(names, seeds, strict=True))
    if len(differing) > NAMED_BY_OPTIONS or len(set(pairs)) < len(pairs):
        names = [run.name for run in known]
    return [
        _alone(run, name, own, seed)
        for run, name, own, seed in zip(known, names, options, seeds, strict=True)
    ]


def _settings(run: RunRecord) -> dict[str, str]:
    """Every setting that decides a result, by name, without the seed."""
    parts = [
        {key: run.config.get(key, default) for key, default in BESIDE.items()},
        # The model's name is not a setting of the recipe.
        {("model" if key == "name" else key): value for key, value in table(run.config.get("model")).items()},
        table(run.config.get("recipe")),
    ]
    return {str(key): shown(value) for part in parts for key, value in part.items() if value is not None}


def _alone(run: RunRecord, name: str, options: dict[str, str], seed: str) -> CellRecord:
    measured = table(run.summary.get("test")) or table(run.summary.get("last"))
    reason = str(run.summary.get("reason") or run.summary.get("unreadable") or "")
    top1, loss = number(measured.get("top1")), number(measured.get("loss"))
    return CellRecord(name, options, seed, run.status, top1, loss, reason, run)
