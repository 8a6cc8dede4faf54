"""F7, F8, F29 and F30: resuming with changed settings, changed data and a checkpoint of another version."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256

import numpy as np
import pytest

from fathoms import FathomsError
from fathoms.cli.main import main
from tiny_runs import stop_after_update


def interrupted(tiny_runs, *words, name="cut", updates=3):
    trainer = tiny_runs.trainer(*words, name=name)
    stop_after_update(trainer, updates)
    assert trainer.run().code == 143


def test_a_changed_setting_is_refused_with_the_difference_and_allowed_by_name(tiny_runs, capsys):
    """F7."""
    interrupted(tiny_runs)
    assert main(["train", *tiny_runs.words("--lr", "0.01", "--epochs", "3", name="cut")]) == 2
    printed = capsys.readouterr().err
    assert "--epochs: 2 -> 3; --lr: 0.002 -> 0.01" in printed
    assert printed.count("\n") == 1
    with pytest.raises(FathomsError, match=r"\(--epochs: 2 -> 3\)"):
        tiny_runs.train("--lr", "0.01", "--epochs", "3", "--allow-change", "lr", name="cut")
    with pytest.raises(FathomsError, match="no setting is called 'learning_rate'; did you mean 'lr'"):
        tiny_runs.train("--allow-change", "learning_rate", name="cut")
    allowed = ["--lr", "0.01", "--epochs", "3", "--allow-change", "lr", "epochs"]
    assert tiny_runs.train(*allowed, name="cut").code == 0
    assert tiny_runs.state("cut")["identity"]["recipe"]["lr"] == 0.01
    # The same command once more has nothing left to allow, and is not an error.
    assert tiny_runs.train(*allowed, name="cut").code == 0
    assert len(tiny_runs.metrics("cut")) == 6


def test_a_checkpoint_in_the_middle_of_an_epoch_has_its_time(tiny_runs):
    interrupted(tiny_runs, "--recovery-interval", "2", updates=3)
    before = tiny_runs.state("cut", "previous")["seconds"]
    assert 0 < before < tiny_runs.state("cut")["seconds"]


def test_an_average_cannot_begin_in_the_middle(tiny_runs):
    interrupted(tiny_runs)
    with pytest.raises(FathomsError, match=r"last: has no EMA; leave --model-ema out"):
        tiny_runs.train("--model-ema", "--allow-change", "model_ema", name="cut")


def test_changed_data_is_refused_and_allowed_by_name(tiny_runs, tmp_path, capsys):
    """F8: one pixel of one image."""
    tiny_runs.data = shutil.copy(tiny_runs.data, tmp_path / "own.npz")
    interrupted(tiny_runs)
    with np.load(tiny_runs.data) as file:
        arrays = dict(file)
    arrays["x_train"][7, 0, 0, 0] ^= 1
    np.savez(tiny_runs.data, **arrays)
    assert main(["train", *tiny_runs.words(name="cut")]) == 2
    assert "the data set has changed since this run began" in capsys.readouterr().err
    assert tiny_runs.train("--allow-change", "data", name="cut").code == 0


def test_another_batch_size_allowed_by_name_starts_the_epoch_over(tiny_runs):
    interrupted(tiny_runs, updates=11)
    outcome = tiny_runs.train("--batch-size", "64", "--allow-change", "batch_size", name="cut")
    assert outcome.code == 0
    assert outcome.summary["updates"] == 8
    assert [row["epoch"] for row in tiny_runs.metrics("cut")] == [1, 1, 2, 2]


@pytest.mark.parametrize("cut", [1, 8, 13])
def test_schedules_and_averages_continue_where_they_were(tiny_runs, cut):
    """F29: the rate that every update sees, warm-up and a rising average's decay across the cut."""
    words = [
        "--warmup-epochs",
        "1",
        "--sched-on-updates",
        "--mixup",
        "0.3",
        "--model-ema",
        "--model-ema-warmup",
    ]
    rates = {}
    for name in ("whole", "cut"):
        seen = rates.setdefault(name, {})
        for last in (True,) if name == "whole" else (False, True):
            trainer = tiny_runs.trainer(*words, name=name)
            step = trainer.loop.stepper.conditional_step.step

            def noted(hold, trainer=trainer, step=step, seen=seen):
                seen[trainer.loop.state.updates] = trainer.learner.optimizer.param_groups[0]["lr"]
                step(hold)

            trainer.loop.stepper.conditional_step.step = noted
            if not last:
                stop_after_update(trainer, cut)
            assert trainer.run().code == (0 if last else 143)
    assert rates["whole"] == rates["cut"]
    assert tiny_runs.same("whole", "cut")


@pytest.mark.parametrize("version", [4, 99, None])
def test_an_unknown_version_is_refused_in_one_line_that_says_what_to_do(tiny_runs, version):
    """F30."""
    interrupted(tiny_runs)
    folder = tiny_runs.checkpoint("cut")
    state = json.loads((folder / "state.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    changed = json.dumps({**state, "version": version}).encode()
    (folder / "state.json").write_bytes(changed)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "state.json": sha256(changed).hexdigest()}))
    with pytest.raises(
        FathomsError, match="this fathoms reads 5 only; install the one that wrote it"
    ) as refused:
        tiny_runs.train(name="cut")
    assert "\n" not in str(refused.value)
