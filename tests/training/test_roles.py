"""The roles of splits in a run: choices on val, test once at the end, the split stored and checked on resume."""

from __future__ import annotations

import json
import tomllib

import numpy as np
import pytest

from fathoms import FathomsError
from fathoms.errors import ConfigError
from tiny_runs import Killed, kill_before_update, stop_after_update


def splits_of(runs, name="run"):
    return [row["split"] for row in runs.metrics(name)]


def test_test_is_evaluated_once_at_the_end_and_said(digit_runs, capsys):
    outcome = digit_runs.train(show=True)
    assert f"test loss {outcome.summary['test']['loss']:.4f} " in capsys.readouterr().err
    assert splits_of(digit_runs) == ["train", "val", "train", "val", "test"]
    assert outcome.summary["test"]["images"] == 359
    assert outcome.summary["test"]["checkpoint"] == "last"
    assert outcome.summary["last"]["images"] == 71
    config = tomllib.loads((digit_runs.folder() / "config.toml").read_text())
    assert config["roles"] == {"train": 1367, "val": 71, "test": 359, "val_share": 0.05}
    split = json.loads((digit_runs.folder() / "split.json").read_text())
    assert len(split["val_indices"]) == 71


def test_the_bits_of_the_held_out_images_are_kept(digit_runs):
    summary = digit_runs.train().summary
    bits = np.unpackbits(np.frombuffer((digit_runs.folder() / "correct.bits").read_bytes(), np.uint8))[:359]
    assert 100 * bits.mean() == pytest.approx(summary["test"]["top1"])


def test_without_a_val_split_the_last_weights_are_the_result(digit_runs):
    summary = digit_runs.train("--val-share", "0").summary
    assert splits_of(digit_runs) == ["train", "train", "test"]
    assert (summary["best"], summary["last"]) == (None, None)
    assert not digit_runs.checkpoint(which="best").exists()
    assert digit_runs.checkpoint().is_dir()


def test_a_val_split_without_a_test_split_says_that_there_is_no_test(tiny_runs):
    summary = tiny_runs.train().summary
    assert summary["test"] is None
    assert "test" not in splits_of(tiny_runs)
    assert (tiny_runs.folder() / "correct.bits").is_file()


def test_a_killed_run_resumes_with_its_split_bit_for_bit(digit_runs):
    digit_runs.train(name="whole")
    trainer = digit_runs.trainer(name="cut")
    kill_before_update(trainer, 20)
    with pytest.raises(Killed):
        trainer.run()
    digit_runs.train(name="cut")
    assert digit_runs.same("whole", "cut")
    assert digit_runs.summary("cut")["test"] == digit_runs.summary("whole")["test"]


def test_another_share_is_another_run(digit_runs):
    digit_runs.train()
    with pytest.raises(FathomsError, match="val-share"):
        digit_runs.train("--val-share", "0.1", "--epochs", "3")


@pytest.mark.parametrize("share", ["-0.1", "1"])
def test_a_share_that_cannot_be_is_refused(digit_runs, share):
    with pytest.raises(FathomsError, match="--val-share"):
        digit_runs.train("--val-share", share)


@pytest.mark.parametrize("damage", ['{"val_indices": [1', '{"version": 1, "val_indices": [1]}', "[]"])
def test_a_damaged_split_is_named_on_resume_and_not_written_over(digit_runs, damage):
    trainer = digit_runs.trainer()
    stop_after_update(trainer, 3)
    trainer.run()
    path = digit_runs.folder() / "split.json"
    whole = path.read_text()
    path.write_text(damage)
    with pytest.raises(ConfigError, match=r"split\.json: damaged or edited.*remove it"):
        digit_runs.train()
    assert path.read_text() == damage
    path.unlink()
    assert digit_runs.train().summary["status"] == "done"
    assert path.read_text() == whole
