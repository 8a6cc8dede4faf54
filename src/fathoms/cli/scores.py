"""`fathoms compare --scores`: the verdicts on runs that were trained elsewhere."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
from pathlib import Path
from typing import Any

from fathoms.cli.flags.early_checks import check_data
from fathoms.errors import ConfigError, flag_of, printable

READ = ("scores", "page", "baseline", "metric", "smallest_difference", "paired", "json")
"""Flags of `compare` that say how scores are compared; the others say how runs are trained."""


def print_verdicts(args: Any) -> int:
    """Judge the scores of a CSV file, and print the answer and the table, or one JSON object; and write a page."""
    for each in dataclasses.fields(args):
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if each.name not in READ and getattr(args, each.name) != default:
            flag = (
                flag_of(each.name) if each.name not in ("data", "run", "training", "switches") else each.name
            )
            raise ConfigError(f"{flag}: nothing is trained with --scores; leave it out")
    check_data(args.scores, "--scores")
    if args.page is not None and Path(args.page).exists():
        raise ConfigError(f"--page {args.page}: is there already; give another name")
    from fathoms.comparing.before_runs import check_metric
    from fathoms.comparing.scores import judge

    check_metric(args.metric, timed=True)
    found = judge(
        args.scores,
        baseline=args.baseline,
        smallest_difference=args.smallest_difference,
        higher_is_better=args.metric == "top1",
        paired=args.paired,
    )
    text = json_format.dumps(found.to_json()) if args.json else repr(found)
    print("\n".join(map(printable, text.splitlines())))
    if args.page is not None:
        from fathoms.report.scores_page import write_scores_page

        page = write_scores_page(found, Path(args.scores).name, Path(args.page))
        print(printable(f"written: {page}"), file=sys.stderr)
    return 0
