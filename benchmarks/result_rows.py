"""Read and write results row by row: a run replaces the rows it measured and leaves the others.

A row holds the device, torch version and measured limits of its own run, since rows of one file come from several.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_report(output: Path | None) -> dict[str, Any]:
    """The report in OUTPUT.json, to which rows are added; a report without rows if there is no such file."""
    if output is None or not output.with_suffix(".json").exists():
        return {"rows": {}}
    return json.loads(output.with_suffix(".json").read_text())


def save_report(
    report: dict[str, Any], output: Path | None, as_table: Callable[[dict[str, Any]], str] | None = None
) -> None:
    """Write OUTPUT.json and, with `as_table`, OUTPUT.md; nothing if there is no output."""
    if output is None:
        return
    output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    if as_table is not None:
        output.with_suffix(".md").write_text(as_table(report))
