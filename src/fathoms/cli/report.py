"""Write report.html, the page of a run, a comparison, or several runs together.

The page is one file, for light and dark screens, and loads nothing from the network. `fathoms train` and `fathoms
compare` write it at the end; this command writes it again, also during a run.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from pathlib import Path

import tyro

from fathoms.cli.flags.early_checks import check_report_folders
from fathoms.errors import printable
from fathoms.files.atomic import check_absent

EXAMPLES = """
fathoms report runs/vit_digits-digits-1a2b3c4d
fathoms report runs/compare-digits-1a2b3c4d --output page.html
fathoms report runs/ln-12 runs/ln-24 runs/dyt-24
"""


@dataclass(frozen=True)
class Args:
    """Folders and output."""

    folders: tyro.conf.Positional[tuple[str, ...]]
    """A run folder, a comparison, or several of them."""
    output: str | None = None
    """File to write; default: report.html in the folder, or in the working folder for several."""
    overwrite: bool = False
    """Replace the file of --output if it is there."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    """Write the page, and print its path."""
    check_report_folders(args.folders)
    from fathoms.report.page import write_report

    output = None if args.output is None else Path(args.output)
    check_absent([] if output is None else [output], args.overwrite)
    target = write_report([Path(folder) for folder in args.folders], output)
    print(json_format.dumps({"report": str(target)}) if args.json else printable(f"written: {target}"))
    return 0
