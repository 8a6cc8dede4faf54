"""Every remedy that a message about data or about a resumed run names is carried out here, and works."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from fathoms.cli.main import main

WORDS = ["--recipe", "digits", "--depth", "1", "--dim", "16", "--heads", "2", "--in-channels", "3"]
WORDS += ["--image-size", "16", "--patch-size", "8", "--epochs", "1", "--batch-size", "8", "--device", "cpu"]


@pytest.fixture
def run(capsys):
    """Call a command; its exit code, and everything it printed."""

    def call(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


@pytest.fixture
def spoilt(photos, tmp_path):
    """Photos of which two of 48 for training cannot be decoded."""
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    for name in ("3.jpg", "4.jpg"):
        (copy / "train/red" / name).write_bytes(b"not an image")
    return copy


def test_too_many_bad_images_leave_no_run_folder_and_both_remedies_work(spoilt, tmp_path, run):
    line = ["train", spoilt, *WORDS, "--output", tmp_path / "runs"]
    code, printed = run(*line)
    assert code == 2
    assert re.search(
        r"\d bad images are more than the 0 allowed: train/red/\d\.jpg .*; "
        r"remove what `fathoms data check` names, or raise --max-bad\n$",
        printed,
    )
    assert not (tmp_path / "runs").exists()
    assert run(*line, "--max-bad", "0.05")[0] == 0
    code, printed = run("data", "check", spoilt, "--json")
    assert code == 1
    for bad in json.loads(printed.splitlines()[-1])["bad"]:
        (spoilt / bad["name"]).unlink()
    # The files are gone that the check named; it need not be run again.
    assert run(*line, "--experiment", "clean")[0] == 0


def test_a_checked_data_set_still_refuses_other_changes(spoilt, tmp_path, run):
    assert run("data", "check", spoilt)[0] == 1
    (spoilt / "train/red/3.jpg").unlink()
    (spoilt / "train/red/5.jpg").unlink()
    code, printed = run("train", spoilt, *WORDS, "--output", tmp_path / "runs")
    assert code == 2
    assert "train/red/5.jpg disappeared since the check; run `fathoms data check` again" in printed
    assert run("data", "check", spoilt)[0] == 1
    assert run("train", spoilt, *WORDS, "--output", tmp_path / "runs", "--max-bad", "0.05")[0] == 0


def test_a_class_of_bad_files_alone_may_be_removed(photos, tmp_path, run):
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    for split in ("train", "val"):
        (copy / split / "amber").mkdir()
        (copy / split / "amber" / "1.jpg").write_bytes(b"")
    assert run("data", "check", copy)[0] == 1
    for split in ("train", "val"):
        shutil.rmtree(copy / split / "amber")
    assert run("train", copy, *WORDS, "--output", tmp_path / "runs")[0] == 0


def test_validation_counts_bad_images_and_takes_more_with_the_same_flag(photos, tmp_path, run):
    assert run("train", photos, *WORDS, "--output", tmp_path, "--experiment", "r")[0] == 0
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    (copy / "val/red/3.jpg").write_bytes(b"not an image")
    line = ["validate", copy, "--checkpoint", tmp_path / "r", "--device", "cpu"]
    code, printed = run(*line)
    assert code == 2
    assert "raise --max-bad" in printed
    code, printed = run(*line, "--max-bad", "0.1")
    assert code == 0
    assert "images 15" in printed
    assert "1 images could not be read" in printed


@pytest.mark.parametrize("value", ["1.5", "-0.1"])
def test_a_share_of_bad_images_is_a_share(value, photos, tmp_path, run):
    code, printed = run("train", photos, *WORDS, "--output", tmp_path / "runs", f"--max-bad={value}")
    assert code == 2
    assert f"--max-bad {value}: use " in printed


@pytest.mark.parametrize(
    ("change", "works"),
    [
        (["--lr", "0.01"], True),
        (["--lr", "0.01", "--smoothing", "0.2"], True),
        (["--drop-path", "0.1"], True),
        (["--depth", "2"], False),
        (["--norm", "learnable_scaler"], False),
        (["--opt", "lamb"], False),
        (["--model-ema"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_change_is_offered_to_be_allowed_only_where_that_works(tmp_path, run, change, works):
    words = ["train", "--depth", "1", "--dim", "16", "--heads", "2", "--batch-size", "512", "--device", "cpu"]
    words += ["--output", tmp_path, "--experiment", "r", "--epochs"]
    assert run(*words, "1")[0] == 0
    code, printed = run(*words, "1", *change)
    assert code == 2
    assert printed.count("\n") == 1
    assert "choose another --experiment" in printed
    offered = re.search(r"or (--allow-change .*)\n", printed)
    assert (offered is not None) == works
    if offered:
        assert run(*words, "1", *change, *offered[1].split())[0] == 0
    assert run(*words, "1", *change, "--experiment", "other")[0] == 0


def test_a_run_without_a_name_is_told_the_one_that_its_remedy_needs(photos, tmp_path, run):
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    line = ["train", copy, *WORDS, "--output", tmp_path / "runs"]
    assert run(*line)[0] == 0
    (copy / "train/red/3.jpg").unlink()
    code, printed = run(*line)
    assert code == 2
    remedy = re.search(r"or (--experiment \S+ --allow-change data)\n", printed)
    assert remedy
    assert run(*line, *remedy[1].split())[0] == 0


def test_the_cifar_recipe_trains_on_a_folder_of_a_few_photos(photos, tmp_path, run):
    words = [
        "--recipe",
        "cifar",
        "--model",
        "vit_small_patch16_224",
        "--depth",
        "1",
        "--dim",
        "24",
        "--heads",
        "2",
    ]
    words += ["--image-size", "32", "--epochs", "1", "--warmup-epochs", "0", "--device", "cpu"]
    code, printed = run("train", photos, *words, "--output", tmp_path)
    assert code == 0, printed
    assert "--batch-size 512 is cut to 48: there are 48 training images" in printed
