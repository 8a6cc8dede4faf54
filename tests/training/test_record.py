"""Records of a run folder for its page, beyond the metrics: none of them changes the training."""

from __future__ import annotations

import base64
import functools
import io
import json
import sys

import numpy as np
import pytest
from PIL import Image

from fathoms.machine import running
from fathoms.training.measurements import best_of
from fathoms.training.run_folder import MOST_STARTS, _commit, environment
from fathoms.training.step import ROW
from tiny_runs import poison, stop_after_update


def updates(runs, name="run"):
    """Update numbers with loss and norm, from all rows."""
    found = {}
    for row in runs.lines("updates.jsonl", name):
        for place, pair in enumerate(zip(row["loss"], row["gradient_norm"], strict=True)):
            assert row["update"] + place not in found
            found[row["update"] + place] = pair
    return found


def test_loss_and_gradient_norm_of_every_update_survive_an_interruption(digit_runs):
    digit_runs.train(name="whole")
    trainer = digit_runs.trainer(name="cut")
    stop_after_update(trainer, 17)
    assert trainer.run().code == 143
    digit_runs.train(name="cut")
    seen = updates(digit_runs, "whole")
    assert list(seen) == list(range(1, 29))
    assert seen == updates(digit_runs, "cut")
    train = [row["loss"] for row in digit_runs.metrics("whole") if row["split"] == "train"]
    assert np.mean([loss for loss, _ in list(seen.values())[:13]]) == pytest.approx(train[0], rel=0.01)
    assert ROW > 14


def test_a_rollback_writes_no_update_twice(tiny_runs):
    trainer = tiny_runs.trainer("--guard", "rollback", "--recovery-interval", "3")
    poison(trainer, {(0, 5)}, trainer.model.blocks[0].mlp, lambda output: output * float("nan"))
    assert trainer.run().code == 0
    assert sorted({*range(1, 17)} - set(updates(tiny_runs))) == [6], "the one that is passed over"


def test_the_last_evaluation_keeps_confusions_and_a_dozen_images(digit_runs):
    digit_runs.train()
    folder = digit_runs.folder()
    kept = json.loads((folder / "evaluation.json").read_text())
    summary = digit_runs.summary()
    assert (kept["split"], kept["epoch"], kept["images"]) == ("test", 2, 359)
    hits = sum(count for true, guess, count in kept["confusion"] if true == guess)
    assert 100 * hits / 359 == pytest.approx(summary["test"]["top1"])
    shown = json.loads((folder / "examples.json").read_text())["examples"]
    assert len(shown) == 12
    assert [one["label"] == one["top"][0][0] for one in shown] == [False] * 6 + [True] * 6
    for one in shown:
        assert one["name"].startswith("test[")
        assert 0 < one["top"][2][1] <= one["top"][0][1] <= 1
        with Image.open(io.BytesIO(base64.b64decode(one["png"]))) as image:
            assert image.size == (8, 8)
            assert np.asarray(image).std() > 20


def test_the_environment_tells_command_start_and_machine(digit_runs, monkeypatch):
    # A notebook's or a test's own command is not that of the run.
    monkeypatch.setattr(sys, "argv", ["pytest", "train", "--epochs", "9"])
    with running(["train", "--epochs", "2"]):
        trainer = digit_runs.trainer()
        stop_after_update(trainer, 17)
        trainer.run()
        digit_runs.train()
    kept = json.loads((digit_runs.folder() / "environment.json").read_text())
    assert kept["version"] == 2
    assert len(kept["starts"]) == 2
    for start in kept["starts"]:
        assert start["command"] == ["fathoms", "train", "--epochs", "2"]
        assert start["time"].endswith("+00:00")
        assert start["host"]
    assert kept["memory"] > 1e8
    assert kept["threads"] == 1
    assert len(environment({"starts": [{}] * 80})["starts"]) == MOST_STARTS
    assert environment()["starts"][-1]["command"] is None


def test_a_package_inside_of_a_project_does_not_have_the_projects_commit(tmp_path):
    assert _commit(tmp_path) is None
    here = environment()["commit"]
    assert here is None or len(here.split()[0]) == 40


def test_epochs_are_counted_from_one_in_every_file(digit_runs):
    digit_runs.train("--probe-interval", "10")
    summary, metrics = digit_runs.summary(), digit_runs.metrics()
    assert (summary["version"], summary["epoch"]) == (2, 2)
    rows = [row for row in metrics if row["split"] == "val"]
    best = functools.reduce(lambda best, row: best_of(best, row, row["images"]), rows, None)
    assert summary["best"]["epoch"] == best["epoch"] >= 1
    rows = digit_runs.lines("probe.jsonl")
    assert [(row["version"], row["epoch"], row["step"]) for row in rows] == [(2, 1, 10), (2, 2, 20)]
    assert digit_runs.state()["best"]["epoch"] == best["epoch"] - 1, "the loop counts from 0"


def test_the_best_epoch_is_the_latest_that_val_cannot_tell_from_the_highest():
    def chosen(accuracies, images):
        rows = [{"epoch": epoch, "top1": top1} for epoch, top1 in enumerate(accuracies)]
        return functools.reduce(lambda best, row: best_of(best, row, images), rows, None)["epoch"]

    assert chosen([97.18, 98.59, 97.18, 97.18], 71) == 3, "one image of 71 is no difference"
    assert chosen([97.18, 98.59, 97.18, 80.0], 71) == 2, "a model that got worse is not taken"
    assert chosen([70.0, 76.0, 75.9, 75.0], 50_000) == 2
    assert chosen([70.0, 76.0, 75.7, 75.0], 50_000) == 1
    # A slow decline is held against the highest, not against the one before.
    assert chosen([90.0 - step / 2 for step in range(9)], 1000) == 1
    assert chosen([100.0, 99.0], 71) == 1, "an accuracy of 100 % has an error, too"
    # Of 4 right of 4, (4 + 1) / (4 + 2) is the share, and sqrt(5/6 * 1/6 / 4) = 18.6 % its standard error.
    assert chosen([100.0, 81.5], 4) == 1
    assert chosen([100.0, 81.2], 4) == 0
