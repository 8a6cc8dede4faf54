"""Files of runs and comparisons as plain values, and quantities as text. The files are untrusted."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError
from fathoms.models.training_record import DO_WITHOUT
from fathoms.untrusted import Row, epoch_of, read_json, read_lines, read_toml

LONGEST = 160
"""Characters of a name that are shown; the rest is cut."""


def shown(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(shown(inner) for inner in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def count(value: int | float) -> str:
    """A count in thousands or millions."""
    scale, unit = next(((s, u) for s, u in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if value >= s), (1.0, ""))
    return f"{value / scale:.3g}{unit}" if scale > 1 else f"{value:g}"


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def file_size(size: int | float) -> str:
    """A size in B, kB, MB or GB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def clipped(text: str, most: int = LONGEST) -> str:
    """A text of at most `most` characters.

    >>> clipped("learnable_scaler", 6)
    'learn…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def score(value: float | None, metric: str) -> str:
    """A score of results.json: accuracy in percent, a loss or seconds."""
    return "–" if value is None else f"{value:.{DIGITS[metric]}f}"


DIGITS = {"top1": 2, "loss": 4, "seconds": 1}
"""Decimals of the measures that decide."""
MOST = 1e300
"""Largest number that is drawn: sums and differences of such numbers are still finite."""


@dataclass(frozen=True)
class RunRecord:
    """The files of a run folder; those that do not exist yet are empty."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: list[Row] = field(default_factory=list)
    probes: list[Row] = field(default_factory=list)
    updates: list[Row] = field(default_factory=list)
    guard: list[Row] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    examples: dict[str, Any] = field(default_factory=dict)
    files: list[tuple[str, int]] = field(default_factory=list)
    folder: Path | None = None

    @property
    def status(self) -> str:
        """The status at the end of the run; "running" where no end is recorded."""
        status = self.summary.get("status")
        return status if isinstance(status, str) else "running"

    def series(self, split: str, field: str) -> list[tuple[float, float | None]]:
        """(epochs done, value) of one metric of one split; None where it is not finite."""
        rows = [row for row in self.metrics if row.get("split") == split and field in row]
        return [(epoch_of(row, 1.0), number(row[field])) for row in rows]


def number(value: Any, otherwise: Any = None) -> Any:
    """The value if it is a number that can be drawn, else `otherwise`."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and abs(value) <= MOST else otherwise


def table(value: Any) -> dict[str, Any]:
    """The value if it is a table, else an empty one."""
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def read_run(folder: Path, light: bool = False) -> RunRecord:
    """Read a run folder; a light record has what is compared between runs."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder}: is not a run folder, it has no config.toml; give a run folder")
    hidden = (".", "report.html")
    every = () if light else folder.rglob("*")
    files = sorted(path for path in every if path.is_file() and not path.name.startswith(hidden))
    return RunRecord(
        name=folder.resolve().name,
        config=read_toml(folder / "config.toml", ConfigError),
        summary=read_json_file(folder / "summary.json"),
        environment=read_json_file(folder / "environment.json"),
        metrics=read_lines(folder / "metrics.jsonl"),
        probes=[] if light else read_lines(folder / "probe.jsonl"),
        updates=[] if light else read_lines(folder / "updates.jsonl"),
        guard=[] if light else read_lines(folder / "guard.jsonl"),
        evaluation={} if light else read_json_file(folder / "evaluation.json"),
        examples={} if light else read_json_file(folder / "examples.json"),
        files=[(str(path.relative_to(folder)), path.stat().st_size) for path in files],
        folder=folder,
    )


def read_json_file(path: Path, remedy: str = DO_WITHOUT) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    return read_json(path, ConfigError, remedy=remedy) if path.is_file() else {}


SCORED = ("done", "stalled")
"""Statuses of cells that count in the mean of their arm."""
REMOVE = "remove the file, and the command of the comparison writes it again"
"""Remedy for a damaged file of a comparison."""
NAMED_BY_OPTIONS = 4
"""Runs that differ in more options than this are named by their folders."""
BESIDE = {"data": None, "swap_norms": None, "initial_checkpoint": None, "initial_head": "load"}
BESIDE |= {"guard": "stop", "guard_limit": 5, "on_spike": "log", "spike_score": 10.0}
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
        reached: Seconds until its accuracy was that to which runs are timed.
        robustness: Accuracy in percent on further image sets.
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
    reached: float | None = None
    robustness: dict[str, float | None] = field(default_factory=dict)

    @functools.cached_property
    def epoch(self) -> int:
        return max((int(epoch_of(row)) for row in self.record.metrics), default=0)

    @property
    def seconds(self) -> float | None:
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
        """Its measure that decides, if it counts in the mean."""
        found = {"top1": self.top1, "loss": self.loss, "seconds": self.reached}
        return found[metric] if self.status in SCORED else None


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
        """The measure that decides: top1, loss, or seconds to an accuracy."""
        found = str(self.results.get("metric") or self.plan.get("metric") or "top1").partition("-to=")[0]
        return found if found in DIGITS else "top1"


def is_comparison(folder: Path) -> bool:
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
        reached=next((number(value) for key, value in row.items() if key.startswith("seconds-to=")), None),
        robustness={
            clipped(str(name), 60): number(top1) for name, top1 in table(row.get("robustness")).items()
        },
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
