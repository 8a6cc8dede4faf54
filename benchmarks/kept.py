"""Results kept row by row: a run replaces the rows it measured and leaves the others as they are.

A row holds the device, torch and measured limits of its own run, since rows of one file come from several.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_report(output: Path | None) -> dict[str, Any]:
    """What OUTPUT.json holds, so that new rows stand beside it; without such a file a report without rows."""
    if output is None or not output.with_suffix(".json").exists():
        return {"rows": {}}
    return json.loads(output.with_suffix(".json").read_text())


def save_report(
    report: dict[str, Any], output: Path | None, as_table: Callable[[dict[str, Any]], str] | None = None
) -> None:
    """Write OUTPUT.json and, where there is a table, OUTPUT.md; without an output nothing."""
    if output is None:
        return
    output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    if as_table is not None:
        output.with_suffix(".md").write_text(as_table(report))
