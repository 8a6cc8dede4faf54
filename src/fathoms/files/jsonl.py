"""Read .jsonl files, such as a run's metrics, a row a line. The files are untrusted, and may still be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError, reason
from fathoms.files.untrusted import MAX_JSON, read_plain

Row = dict[str, Any]

MOST_EPOCHS = 1e15


def read_lines(path: Path) -> list[Row]:
    """The objects of a .jsonl file; a last line without a newline is still being written, or was cut by a kill."""
    if not path.is_file():
        return []
    try:
        whole = read_plain(path, MAX_JSON).decode("utf-8", errors="replace").split("\n")[:-1]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)})") from error
    return [
        _object(line, f"{path}: line {index}") for index, line in enumerate(whole, start=1) if line.strip()
    ]


def _object(text: str, where: str) -> Row:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as JSON ({reason(error)})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: is not a JSON object")
    return value


def epoch_of(row: Row, otherwise: float = 0.0) -> float:
    """The epoch of a row, counted from 1; rows without a version count from 0.

    >>> epoch_of({"version": 2, "epoch": 3}), epoch_of({"epoch": 3}), epoch_of({"epoch": "x"})
    (3.0, 4.0, 0.0)
    """
    epoch = row.get("epoch")
    if not isinstance(epoch, int | float) or isinstance(epoch, bool) or not abs(epoch) <= MOST_EPOCHS:
        return otherwise
    return float(epoch) + ("version" not in row)
