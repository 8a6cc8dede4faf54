"""Trackers get what metrics.jsonl holds, and none of them can stop a run."""

from __future__ import annotations

import sys
import threading
import time
import types

import pytest

from fathoms.cli.main import main
from fathoms.training import trackers

SMALL = ("--depth", "1", "--batch-size", "400")


def train(runs, log):
    return runs.train(*SMALL, "--log", log, show=True)


def expected(runs, name):
    split, _, field = name.partition("/")
    return [(row["step"], row[field]) for row in runs.metrics() if row["split"] == split]


def test_tensorboard_files_hold_the_metrics(digit_runs):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert train(digit_runs, "tensorboard").code == 0
    events = accumulator.EventAccumulator(str(digit_runs.folder() / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/top1", "train/lr", "val/loss", "val/top1"} <= set(events.Tags()["scalars"])
    for name in ("train/loss", "val/top1"):
        points = [(point.step, point.value) for point in events.Scalars(name)]
        assert points == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in expected(digit_runs, name)
        ]


class Recorder(types.ModuleType):
    """A stand-in for a tracker's module that writes down how it was called."""

    def __init__(self, name, broken=""):
        super().__init__(name)
        self.calls, self.broken = [], broken
        self.threads = set()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **options):
            self.threads.add(threading.current_thread())
            self.calls.append((name, args, options))
            if name == self.broken:
                raise RuntimeError("the network\nis down")
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="id7"))

        return call

    def named(self, name):
        return [(args, options) for called, args, options in self.calls if called == name]


ROWS = {"wandb": "log", "trackio": "log", "mlflow": "log_metrics"}


@pytest.mark.parametrize("name", ROWS)
def test_a_tracker_gets_every_row_in_another_thread(digit_runs, monkeypatch, name):
    tracker = Recorder(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    assert train(digit_runs, name).code == 0
    rows = [(options["step"], args[0]) for args, options in tracker.named(ROWS[name])]
    assert [(step, values["val/top1"]) for step, values in rows if "val/top1" in values] == expected(
        digit_runs, "val/top1"
    )
    assert [(step, values["train/lr"]) for step, values in rows if "train/lr" in values] == expected(
        digit_runs, "train/lr"
    )
    assert threading.main_thread() not in tracker.threads
    assert tracker.calls[-1][0] in ("finish", "end_run")


BREAKS = [("wandb", "init"), ("wandb", "log"), ("wandb", "finish"), ("trackio", "log")]
BREAKS += [("mlflow", "start_run"), ("mlflow", "log_metrics"), ("mlflow", "end_run")]


@pytest.mark.parametrize(("name", "call"), BREAKS)
def test_a_tracker_that_fails_is_dropped_with_a_line_and_the_run_continues(
    digit_runs, monkeypatch, capsys, name, call
):
    tracker = Recorder(name, broken=call)
    monkeypatch.setitem(sys.modules, name, tracker)
    outcome = train(digit_runs, name)
    assert (outcome.code, outcome.summary["status"]) == (0, "done")
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("log:")]
    assert printed == [
        f"log: {name} failed and is dropped (the network is down); metrics.jsonl has everything"
    ]
    assert len(tracker.named(call)) == 1
    assert len(digit_runs.metrics()) == 5


def test_one_that_fails_does_not_take_another_with_it(digit_runs, monkeypatch):
    broken, sound = Recorder("wandb", broken="log"), Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "wandb", broken)
    monkeypatch.setitem(sys.modules, "mlflow", sound)
    assert train(digit_runs, "wandb,mlflow").code == 0
    assert len(sound.named("log_metrics")) == 5


def test_one_that_hangs_is_abandoned(digit_runs, monkeypatch, capsys):
    tracker, held = Recorder("wandb"), threading.Event()
    tracker.log = lambda *_args, **_options: held.wait(60)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    began = time.monotonic()
    assert train(digit_runs, "wandb").code == 0
    assert time.monotonic() - began < 40
    held.set()
    assert "did not finish within 0 s and is abandoned" in capsys.readouterr().err


def test_a_resumed_run_is_the_same_run_there(digit_runs, monkeypatch):
    tracker = Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", tracker)
    train(digit_runs, "mlflow")
    train(digit_runs, "mlflow")
    assert [options["run_id"] for _, options in tracker.named("start_run")] == [None, "id7"]
    assert len(tracker.named("log_params")) == 1


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("wandb", "--log wandb: not installed; pip install 'fathoms[log]', or wandb alone"),
        ("tensorbord", "--log: no tracker is called 'tensorbord'; did you mean 'tensorboard'?"),
        ("tensorboard,mlflow", "--log mlflow: not installed"),
    ],
)
def test_a_missing_or_misspelt_tracker_is_refused_before_anything_is_written(
    digit_runs, monkeypatch, capsys, log, message
):
    pytest.importorskip("tensorboard")
    for name in ROWS:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", *digit_runs.words(*SMALL, "--log", log)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not list(digit_runs.root.iterdir())
