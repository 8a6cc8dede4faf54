"""Arguments of `fathoms train`, and its last printed lines."""

from __future__ import annotations

from fathoms.cli.flags.early_checks import path_or_digits
from fathoms.cli.train import closing

SUMMARY = {
    "status": "interrupted",
    "epoch": 2,
    "updates": 17,
    "seconds": 3.0,
    "reason": None,
    "best": None,
    "last": None,
    "test": None,
}


def test_only_files_that_are_there_are_named(tmp_path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    report = closing({**SUMMARY, "folder": str(tmp_path)})
    assert report.splitlines()[-2] == f"run folder {tmp_path}: config.toml, checkpoints/last"


def test_an_interrupted_run_says_how_it_goes_on_and_from_where(tmp_path):
    last = closing({**SUMMARY, "folder": str(tmp_path)}).splitlines()[-1]
    assert last == "next: give the same command again; it resumes in epoch 3, after update 17"


def test_a_run_that_is_done_says_which_weights_the_next_command_takes(tmp_path):
    done = {**SUMMARY, "status": "done", "folder": str(tmp_path)}
    assert closing(done).endswith(f"\nnext: fathoms validate --checkpoint {tmp_path}")
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    assert closing(done).endswith(f"\nnext, of checkpoints/best: fathoms validate --checkpoint {tmp_path}")


def test_one_epoch_is_not_epochs(tmp_path):
    best = {"epoch": 1, "top1": 10.0}
    report = closing({**SUMMARY, "epoch": 1, "folder": str(tmp_path), "last": best, "best": best})
    assert "interrupted after 1 epoch, 3 s" in report
    assert "(best 10.00 % in epoch 1)" in report


def test_a_run_without_a_finite_evaluation_has_no_best(tmp_path):
    report = closing({**SUMMARY, "folder": str(tmp_path), "last": {"top1": 10.0}})
    assert "val accuracy 10.00 %\n" in report
    assert "best" not in report


def test_the_test_accuracy_is_that_of_the_last_weights(tmp_path):
    report = closing({**SUMMARY, "folder": str(tmp_path), "last": {"top1": 10.0}, "test": {"top1": 9.5}})
    assert "test accuracy 9.50 % of the last weights\n" in report


def test_the_built_in_digits_have_a_name_unless_a_path_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert path_or_digits("digits") is None
    (tmp_path / "digits").mkdir()
    assert path_or_digits("digits") == "./digits", "told apart from the built-in ones in every record"
    assert path_or_digits("photos") == "photos"
