"""The last printed lines of `fathoms train`."""

from __future__ import annotations

from fathoms.cli.train import closing

SUMMARY = {
    "status": "interrupted",
    "epoch": 2,
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
    assert report.splitlines()[-1] == f"run folder {tmp_path}: config.toml, checkpoints/last"


def test_a_run_without_a_finite_evaluation_has_no_best(tmp_path):
    report = closing({**SUMMARY, "folder": str(tmp_path), "last": {"top1": 10.0}})
    assert "val accuracy 10.00 %\n" in report
    assert "best" not in report


def test_the_test_accuracy_is_that_of_the_last_weights(tmp_path):
    report = closing({**SUMMARY, "folder": str(tmp_path), "last": {"top1": 10.0}, "test": {"top1": 9.5}})
    assert "test accuracy 9.50 % of the last weights\n" in report
