"""Write report.html, the page of a run, a comparison, or several runs together.

The page is one file, for light and dark screens, and loads nothing from the network. `fathoms train` and `fathoms
compare` write it at the end; this command writes it again, also during a run. With --follow it writes the page as the
runs go on, and the page in a browser reloads itself; nothing listens on a port.

Exit status: 0, 1 if the summary of a run could not be read (it is named), 2 if there is no page.
"""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from fathoms.cli.flags.early_checks import check_report_folders
from fathoms.errors import printable
from fathoms.files import check_absent

EXAMPLES = """
fathoms report runs/vit_digits-digits-1a2b3c4d
fathoms report runs/compare-digits-1a2b3c4d --output page.html
fathoms report runs/ln-12 runs/ln-24 runs/dyt-24
fathoms report runs/compare-digits-1a2b3c4d --follow
"""


@dataclass(frozen=True)
class Args:
    """Folders and output."""

    folders: tyro.conf.Positional[tuple[str, ...]]
    """A run folder, a comparison, or several of them."""
    output: str | None = None
    """File to write; default: report.html in the folder, or in the working folder for several."""
    follow: bool = False
    """Write the page again as its files change, until every run has ended or Ctrl-C."""
    overwrite: bool = False
    """Replace a file that is there: that of --output, or a report.html that is not a page of fathoms."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    check_report_folders(args.folders)
    from fathoms.report.page import follow, foreign_page, page_of, write_report
    from fathoms.report.records import unreadable_runs

    folders = [Path(folder) for folder in args.folders]
    output = foreign_page(folders) if args.output is None else Path(args.output)
    check_absent([] if output is None else [output], args.overwrite)
    damaged = unreadable_runs(folders)
    if args.follow:
        shown = (output or page_of(folders)).resolve().as_uri()
        print(f"open {shown}; it is written again until the runs end or Ctrl-C", file=sys.stderr, flush=True)
    target = (follow if args.follow else write_report)(folders, output)
    for line in damaged:
        print(printable(f"fathoms report: {line}"), file=sys.stderr)
    print(
        json_format.dumps({"report": str(target), "unreadable": damaged})
        if args.json
        else printable(f"written: {target}")
    )
    return 1 if damaged else 0
