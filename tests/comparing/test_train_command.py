"""The command that a page gives for its best arm, read back by the command line: it describes the run of that arm."""

from __future__ import annotations

import shlex
from pathlib import Path

from fathoms.cli import train as train_cli
from fathoms.cli.flags.parse import parse
from fathoms.report.arm_views import arms_of
from fathoms.report.comparison_page import train_command
from fathoms.report.records import read_comparison

NORMS = ("--axis", "norm=layernorm,dyt", "--seeds", "1", "--epochs", "1")


def test_the_command_of_an_arm_describes_its_run_and_is_empty_before_one(comparisons):
    assert comparisons.run(*NORMS) == 0
    cells = {cell.arm: cell for cell in comparisons.make(*NORMS).cells()}
    found = read_comparison(comparisons.folder())
    for arm in arms_of(found):
        words = shlex.split(train_command(arm))
        assert words[:2] == ["fathoms", "train"]
        job = train_cli.make_job(parse(train_cli, "train", words[2:]))
        assert job.identity() == cells[arm.name].job.identity()
        assert job.folder == Path("runs") / cells[arm.name].folder.name
    (comparisons.folder() / "cells").rename(comparisons.folder() / "moved")
    assert [train_command(arm) for arm in arms_of(read_comparison(comparisons.folder()))] == ["", ""]
