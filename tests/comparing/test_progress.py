"""Progress of a comparison: lines, and on a terminal a live table."""

import os
import pty
import select
import sys
import time

from fathoms.cli.terminal.live_output import live_table
from fathoms.comparing.folder import ComparisonFolder
from fathoms.comparing.progress import Progress

NORMS = ("--axis", "norm=layernorm,dyt", "--seeds", "3")


def test_the_table_has_done_failed_running_time_left_and_the_leader(comparisons, monkeypatch):
    from fathoms.comparing import progress as module

    monkeypatch.setattr(module, "REFRESH", 0.01)
    cells, shown, said = comparisons.make(*NORMS).cells(), [], []
    progress = Progress(
        ComparisonFolder(comparisons.folder()), 2, "last", said.append, lambda: "dyt leads", shown.append
    )
    progress.ahead = cells
    assert dict(progress.rows())["left"] == "not known yet"
    progress.began(cells[0])
    progress.began(cells[1])
    progress.ended(cells[0], {"status": "failed", "reason": "no [memory]", "wall_seconds": 1.0})
    progress.ended(cells[2], {"status": "done", "wall_seconds": 60.0})
    while not shown:
        time.sleep(0.01)
    progress.close()
    rows = dict(progress.rows())
    assert (rows["done"], rows["failed"], rows["leader"]) == ("1 of 6", "1", "dyt leads")
    assert rows["running"].startswith(cells[1].folder.name)
    assert rows["left"] == "about 2 min 0 s", "four runs of a minute on two workers"
    assert len(said) == 2
    assert "no [memory]" in said[0]


def test_the_time_left_is_that_of_the_epochs_and_the_kind_of_each_run(comparisons):
    tuned = comparisons.make(*NORMS, "--tune", "lr=1e-3,2e-3", "--tune-epochs", "1", "--epochs", "10")
    progress = Progress(tuned.folder, 1, "last", lambda _: None, str)
    trials = [trial.cell for trial in tuned.trials()]
    progress.ahead = [*trials, *tuned.cells()]
    for trial in trials:
        progress.ended(trial, {"status": "done", "wall_seconds": 1.0 if "layernorm" in trial.arm else 3.0})
    progress.close()
    # Three runs of ten epochs at a second each, and three at three seconds each.
    assert dict(progress.rows())["left"] == "about 2 min 0 s"


def test_a_terminal_gets_the_table_and_whole_lines(monkeypatch):
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal, os.fdopen(master, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stdout", terminal)
        with live_table(terminal=True) as (say, show):
            say("[1/6] a, seed 0: done")
            show([("done", "1 of 6"), ("leader", "[bold]a leads")])
        terminal.flush()
        text = b""
        while select.select([screen], [], [], 0.2)[0]:
            text += screen.read(4096)
    for word in (b"[1/6] a, seed 0: done", b"1 of 6", b"[bold]a leads"):
        assert word in text


def test_away_from_a_terminal_there_are_lines_alone(capsys):
    with live_table(terminal=False) as (say, show):
        say("a line")
    assert show is None
    assert capsys.readouterr().out == "a line\n"
