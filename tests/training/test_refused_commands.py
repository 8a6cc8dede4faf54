"""Data that cannot be trained on, and folders that are not a run's; tests/cli/mistakes.txt has wrong flags."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from fathoms.cli.main import main


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"y_train": [0, 1, 2, -1] * 3}, "y_train holds -1; number the classes from 0"),
        ({"y_train": [0, 1, 2, 7] * 3, "classes": ["a", "b", "c"]}, "labels run to 7 for 3 classes"),
        ({"y_test": [0, 1, 2, 4] * 3}, "class '3' has no training images; fill or remove it, or number"),
        ({"y_train": [0.5, 1, 2, 1] * 3}, "y_train"),
        ({"y_train": [0, 1, 2]}, "12"),
    ],
    ids=["negative", "beyond the names", "only in the test", "no whole number", "too few"],
)
def test_labels_that_cannot_be_are_refused(tmp_path, capsys, labels, message):
    images = np.zeros((12, 8, 8, 3), np.uint8)
    fine = {"x_train": images, "y_train": [0, 1, 2] * 4, "x_test": images, "y_test": [0, 1, 2] * 4}
    np.savez(tmp_path / "set.npz", **{name: np.array(value) for name, value in (fine | labels).items()})
    words = ["--model", "vit_digits", "--in-channels", "3", "--batch-size", "4", "--device", "cpu"]
    assert main(["train", str(tmp_path / "set.npz"), *words, "--output", str(tmp_path / "runs")]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_class_of_val_alone_and_an_unreadable_file_are_named(photos, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(photos, broken)
    (broken / "train" / "green").mkdir()
    shutil.copytree(broken / "val" / "red", broken / "val" / "green")
    words = ["--model", "vit_tiny_patch16_224", "--image-size", "32", "--depth", "1", "--batch-size", "8"]
    words += ["--output", str(tmp_path / "runs"), "--device", "cpu", "--epochs", "1"]
    assert main(["train", str(broken), *words]) == 2
    assert "green" in capsys.readouterr().err
    shutil.rmtree(broken / "val" / "green")
    (broken / "train" / "red" / "3.jpg").write_bytes(b"not an image")
    assert main(["train", str(broken), *words]) == 2
    assert "red/3.jpg" in capsys.readouterr().err


def test_a_checked_data_set_that_changed_is_refused_by_name(photos, tmp_path, capsys):
    checked = tmp_path / "checked"
    shutil.copytree(photos, checked)
    assert main(["data", "check", str(checked)]) in (0, 1)
    shutil.copy(checked / "train" / "red" / "3.jpg", checked / "train" / "red" / "new.jpg")
    capsys.readouterr()
    assert main(["train", str(checked), "--output", str(tmp_path / "runs"), "--device", "cpu"]) == 2
    assert "red/new.jpg was added since the check" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["plan.json", "cells/a-seed0/config.toml"])
def test_the_folder_of_a_comparison_is_left_as_it_is(tmp_path, capsys, file):
    kept = tmp_path / "a" / file
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    (tmp_path / "a" / "split.json").write_text("{}")
    there = sorted(tmp_path.rglob("*"))
    words = ["--depth", "2", "--dim", "16", "--heads", "2", "--epochs", "1", "--device", "cpu"]
    words += ["--output", str(tmp_path), "--experiment", "a", "--val-share", "0.3"]
    assert main(["train", *words]) == 2
    assert "a: holds a comparison, not a run; choose another --experiment" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == there
