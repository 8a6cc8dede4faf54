"""Write report.html: a page about one run, with its curves, its settings and the norms of its layers.

The page is one file. It opens anywhere, in light and dark, and loads nothing from anywhere. `fathoms train` writes
it at the end; this command writes it again, also while a run goes on.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from pathlib import Path

import tyro

EXAMPLES = """
fathoms report runs/vit_digits-digits-1a2b3c4d
fathoms report runs/NAME --output page.html
"""


@dataclass(frozen=True)
class Args:
    """Which run."""

    run: tyro.conf.Positional[str]
    """The run's folder."""
    output: str | None = None
    """Where the page goes; without it, report.html in the run's folder."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    """Write the page, and say where it is."""
    from fathoms.report.page import write_report

    target = write_report(Path(args.run), None if args.output is None else Path(args.output))
    print(json_format.dumps({"report": str(target)}) if args.json else f"written: {target}")
    return 0
