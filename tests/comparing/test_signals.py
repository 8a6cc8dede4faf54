"""Signals to a comparison, its budget, and the death of its parent."""

import json
import signal
import time

import pytest

from tiny_comparisons import alive, children, sabotage, wait_for

LONG = ("--axis", "norm=layernorm,dyt", "--seeds", "1", "--jobs", "2", "--epochs", "20000")
# A worker that hears no signal and never ends its cell.
DEAF = """
import signal, sys, time
if "fathoms.comparing.worker" in sys.orig_argv:
    from fathoms.training.run import Trainer
    def deaf(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.context.folder.open()
        (self.context.folder.path / "metrics.jsonl").write_text("{}")
        time.sleep(600)
    Trainer.run = deaf
"""


def training(comparisons, since):
    """Whether both cells have written a row since a time."""
    files = list(comparisons.folder().glob("cells/*/metrics.jsonl"))
    return len(files) == 2 and all(file.stat().st_size and file.stat().st_mtime > since for file in files)


def updates(comparisons):
    files = sorted(comparisons.folder().glob("cells/*/summary.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
def test_signals_let_the_runs_save_and_give_the_exit_code_and_the_same_command_resumes(comparisons, capsys):
    before = [0, 0]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        began = time.time()
        process = comparisons.start(*LONG)
        wait_for(lambda began=began: training(comparisons, began), process)
        workers = children(process.pid)
        assert len(workers) == 2
        if number == signal.SIGINT:
            assert comparisons.run(*LONG) == 2
            assert "another comparison holds this folder" in capsys.readouterr().err
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == code, said
        assert "Traceback" not in said
        assert not any(map(alive, workers))
        ended = updates(comparisons)
        assert [run["status"] for run in ended] == ["interrupted"] * 2
        assert all(run["updates"] > least for run, least in zip(ended, before, strict=True))
        before = [run["updates"] for run in ended]
    assert {row["status"] for row in comparisons.rows()} == {"pending"}


@pytest.mark.slow
def test_workers_end_within_seconds_of_their_parent_and_a_used_up_budget_exits_with_75(comparisons):
    began = time.time()
    process = comparisons.start(*LONG)
    wait_for(lambda: training(comparisons, began), process)
    workers = children(process.pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 5
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    process = comparisons.start(*LONG, "--budget", "15s")
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 75, said
    assert "give the same command again" in said


@pytest.mark.slow
def test_the_second_signal_ends_the_comparison_at_once(comparisons, monkeypatch, tmp_path):
    sabotage(tmp_path / "deaf", monkeypatch, DEAF)
    began = time.time()
    process = comparisons.start(*LONG)
    wait_for(lambda: training(comparisons, began), process)
    workers = children(process.pid)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    process.communicate()
    time.sleep(0.5)
    assert not any(map(alive, workers))
