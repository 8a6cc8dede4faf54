"""Write report.html, the report page of a run: curves, settings, norms by layer.

The page is one file, for light and dark screens, and loads nothing from the network. `fathoms train` writes it at
the end; this command writes it again, also during a run.
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
    """Run folder and output."""

    run: tyro.conf.Positional[str]
    """The run folder."""
    output: str | None = None
    """File to write; default: report.html in the run folder."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    """Write the page, and print its path."""
    from fathoms.report.page import write_report

    target = write_report(Path(args.run), None if args.output is None else Path(args.output))
    print(json_format.dumps({"report": str(target)}) if args.json else f"written: {target}")
    return 0
