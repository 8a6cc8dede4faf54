"""Result files of an evaluation: .csv for spreadsheets, .json for scripts."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError
from fathoms.evaluate.confusion import Confusion
from fathoms.files.atomic import write_atomic
from fathoms.files.csv_cells import inert

Results = dict[str, dict[str, Any]]


def check_target(flag: str, target: str | None, endings: tuple[str, ...]) -> None:
    """Refuse an output file that cannot be written, before the evaluation starts."""
    if target is None:
        return
    path = Path(target)
    if path.suffix not in endings:
        raise ConfigError(
            f"{flag} {target}: this file is written as {' or '.join(endings)}; change the ending"
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag} {target}: its folder cannot be written; create it or choose another")


def _write_csv(target: str, rows: Iterable[Iterable[Any]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([inert(cell) for cell in row] for row in rows)
    write_atomic(Path(target), text.getvalue().encode(errors="replace"))


def written_out(results: Results) -> Results:
    """The results for JSON, with every row of the confusion matrix."""
    return {place: {**result, "confusion": list(result["confusion"])} for place, result in results.items()}


def write_results(target: str, results: Results) -> None:
    """All metrics as .json, or one row for each data set as .csv."""
    if target.endswith(".json"):
        text = json.dumps({"results": written_out(results)}, indent=1)
        write_atomic(Path(target), text.encode() + b"\n")
        return
    names = list(dict.fromkeys(name for row in results.values() for name, v in row.items() if _plain(v)))
    rows = ([place, *(row.get(name) for name in names)] for place, row in results.items())
    _write_csv(target, [["data", *names], *rows])


def _plain(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple | Confusion)


def write_per_class(target: str, results: Results) -> None:
    """One row for each class of each data set."""
    rows: list[list[Any]] = [["data", "class", "images", "top1"]]
    for place, result in results.items():
        for index, (name, accuracy) in enumerate(result["per_class"].items()):
            rows.append([place, name, result["confusion"].images(index), accuracy])
    _write_csv(target, rows)


def write_confusion(target: str, results: Results) -> None:
    """Confusion matrix of the first data set: a row for each true class, a column for each predicted one."""
    first = next(iter(results.values()))
    named = zip(first["per_class"], first["confusion"], strict=True)
    _write_csv(target, [["true class", *first["per_class"]], *([name, *row] for name, row in named)])
