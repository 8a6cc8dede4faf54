"""Read the files of a run folder as plain values, for its report page. The files are untrusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError
from fathoms.evaluate.training_record import DO_WITHOUT, current_summary
from fathoms.files.jsonl import Row, epoch_of, read_lines
from fathoms.files.untrusted import read_json, read_toml

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
        summary=current_summary(read_json_file(folder / "summary.json")),
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
