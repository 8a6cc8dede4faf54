"""Read the files of a run folder as plain values, for its report page. The files are untrusted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError, reason
from fathoms.untrusted_files import MAX_JSON, read_json, read_plain, read_toml

Row = dict[str, Any]

MOST = 1e300
"""Largest number that is drawn: sums and differences of such numbers are still finite."""


@dataclass(frozen=True)
class RunRecord:
    """The files of a run folder; those that do not exist yet are empty."""

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[Row]
    probes: list[Row]
    files: list[tuple[str, int]]

    @property
    def status(self) -> str:
        """The status at the end of the run; "running" where no end is recorded."""
        status = self.summary.get("status")
        return status if isinstance(status, str) else "running"

    def series(self, split: str, field: str) -> list[tuple[float, float | None]]:
        """(epochs done, value) of one metric of one split; None where it is not finite."""
        rows = [row for row in self.metrics if row.get("split") == split and field in row]
        return [(number(row.get("epoch"), 0.0) + 1, number(row[field])) for row in rows]


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


def read_run(folder: Path) -> RunRecord:
    """Read a run folder."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder}: is not a run folder, it has no config.toml; give a run folder")
    hidden = (".", "report.html")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(hidden))
    return RunRecord(
        name=folder.resolve().name,
        config=read_toml(folder / "config.toml", ConfigError),
        summary=_json(folder / "summary.json"),
        environment=_json(folder / "environment.json"),
        metrics=_lines(folder / "metrics.jsonl"),
        probes=_lines(folder / "probe.jsonl"),
        files=[(str(path.relative_to(folder)), path.stat().st_size) for path in files],
    )


def _json(path: Path) -> dict[str, Any]:
    return read_json(path, ConfigError) if path.is_file() else {}


def _lines(path: Path) -> list[Row]:
    """The objects of a .jsonl file; a last line without a newline is still being written."""
    if not path.is_file():
        return []
    try:
        whole = read_plain(path, MAX_JSON).decode("utf-8", errors="replace").split("\n")[:-1]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)})") from error
    return [
        _object(line, f"{path}: line {index}") for index, line in enumerate(whole, start=1) if line.strip()
    ]


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as JSON ({reason(error)})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: is not a JSON object")
    return value
