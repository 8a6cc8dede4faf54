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
    assert f"run folder {tmp_path}: config.toml, checkpoints/last next:" in " ".join(report.split())


def test_an_interrupted_run_says_how_it_goes_on_and_from_where(tmp_path):
    last = closing({**SUMMARY, "folder": str(tmp_path)}).splitlines()[-1]
    assert last == "next: give the same command again; it resumes in epoch 3, after update 17"


def test_every_accuracy_says_which_weights_and_how_many_images(tmp_path):
    last, best = {"epoch": 3, "top1": 95.0, "images": 71}, {"epoch": 2, "top1": 99.0, "images": 71}
    test = {"top1": 94.5, "images": 1000}
    done = {**SUMMARY, "status": "done", "epoch": 3, "folder": str(tmp_path), "test": test}
    lines = closing({**done, "last": last, "best": best}).splitlines()
    assert lines[1:4] == [
        "val accuracy 95.00 % of 71 images, last weights",
        "val accuracy 99.00 % of 71 images, weights of epoch 2: checkpoints/best",
        "test accuracy 94.50 % of 1,000 images, last weights",
    ]
    assert lines[-1] == f"next: fathoms validate --checkpoint {tmp_path}"
    assert "checkpoints/best" not in closing({**done, "last": last, "best": last})


def test_a_run_without_a_finite_evaluation_has_no_best(tmp_path):
    report = closing({**SUMMARY, "epoch": 1, "folder": str(tmp_path), "last": {"top1": 10.0, "images": 1}})
    assert "interrupted after 1 epoch, 3 s" in report
    assert "val accuracy 10.00 % of 1 image, last weights\n" in report
    assert "best" not in report


def test_the_built_in_digits_have_a_name_unless_a_path_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert path_or_digits("digits") is None
    (tmp_path / "digits").mkdir()
    assert path_or_digits("digits") == "./digits", "told apart from the built-in ones in every record"
    assert path_or_digits("photos") == "photos"
