"""Trackers see what metrics.jsonl holds, and none of them can stop a run."""

from __future__ import annotations

import json
import sys
import threading
import time
import types

import pytest
import torch

from fathoms.cli import train as train_command
from fathoms.cli.main import main
from fathoms.cli.parse import parse
from fathoms.train.distributed import World
from fathoms.train.loop import Trainer
from fathoms.train.record import trackers as mirrors

TINY = [
    "--depth",
    "1",
    "--dim",
    "16",
    "--heads",
    "2",
    "--epochs",
    "2",
    "--batch-size",
    "400",
    "--device",
    "cpu",
]


def train(tmp_path, log, *words):
    words = [*TINY, "--output", str(tmp_path), "--experiment", "run", "--log", log, *words]
    job = train_command.make_job(parse(train_command, "train", words))
    return Trainer(job, World(0, 1, torch.device("cpu"))).run()


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def expected(tmp_path, name):
    split, _, field = name.partition("/")
    return [(row["step"], row[field]) for row in metrics(tmp_path) if row["split"] == split]


def test_tensorboard_files_hold_the_metrics(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert train(tmp_path, "tensorboard").code == 0
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/top1", "train/lr", "val/loss", "val/top1"} <= set(events.Tags()["scalars"])
    for name in ("train/loss", "val/top1"):
        points = [(point.step, point.value) for point in events.Scalars(name)]
        assert points == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected(tmp_path, name)]


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
def test_a_tracker_gets_every_row_in_another_thread(tmp_path, monkeypatch, name):
    tracker = Recorder(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    assert train(tmp_path, name).code == 0
    rows = [(options["step"], args[0]) for args, options in tracker.named(ROWS[name])]
    assert [(step, values["val/top1"]) for step, values in rows if "val/top1" in values] == expected(
        tmp_path, "val/top1"
    )
    assert [(step, values["train/lr"]) for step, values in rows if "train/lr" in values] == expected(
        tmp_path, "train/lr"
    )
    assert threading.main_thread() not in tracker.threads
    assert tracker.calls[-1][0] in ("finish", "end_run")


BREAKS = [("wandb", "init"), ("wandb", "log"), ("wandb", "finish"), ("trackio", "log")]
BREAKS += [("mlflow", "start_run"), ("mlflow", "log_metrics"), ("mlflow", "end_run")]


@pytest.mark.parametrize(("name", "call"), BREAKS)
def test_a_tracker_that_fails_is_dropped_with_a_line_and_the_run_goes_on(
    tmp_path, monkeypatch, capsys, name, call
):
    tracker = Recorder(name, broken=call)
    monkeypatch.setitem(sys.modules, name, tracker)
    outcome = train(tmp_path, name)
    assert (outcome.code, outcome.summary["status"]) == (0, "done")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("log:")]
    assert said == [f"log: {name} failed and is dropped (the network is down); metrics.jsonl has everything"]
    assert len(tracker.named(call)) == 1
    assert len(metrics(tmp_path)) == 4


def test_one_that_fails_does_not_take_another_with_it(tmp_path, monkeypatch):
    broken, sound = Recorder("wandb", broken="log"), Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "wandb", broken)
    monkeypatch.setitem(sys.modules, "mlflow", sound)
    assert train(tmp_path, "wandb,mlflow").code == 0
    assert len(sound.named("log_metrics")) == 4


def test_one_that_hangs_is_left_behind(tmp_path, monkeypatch, capsys):
    tracker, held = Recorder("wandb"), threading.Event()
    tracker.log = lambda *_args, **_options: held.wait(60)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setattr(mirrors, "PATIENCE", 0.2)
    began = time.monotonic()
    assert train(tmp_path, "wandb").code == 0
    assert time.monotonic() - began < 40
    held.set()
    assert "did not end within 0 s and is left behind" in capsys.readouterr().err


def test_a_run_that_goes_on_is_the_same_run_there(tmp_path, monkeypatch):
    tracker = Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", tracker)
    train(tmp_path, "mlflow")
    train(tmp_path, "mlflow")
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
    tmp_path, monkeypatch, capsys, log, message
):
    pytest.importorskip("tensorboard")
    for name in ROWS:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", *TINY, "--log", log, "--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())
