"""Oddities of a data set get a line each, in training and in `data check` and `data info`."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from fathoms.cli.main import main
from fathoms.data import list_splits, open_source
from fathoms.data.readiness import notices
from tiny_data import MAKERS

TINY = ["--recipe", "digits", "--depth", "1", "--dim", "16", "--heads", "2", "--in-channels", "3"]
TINY += ["--image-size", "16", "--patch-size", "8", "--epochs", "1", "--device", "cpu"]


def arrays(path, train=8, test=8, classes=2, copy=False):
    rng = np.random.default_rng(0)
    x, other = (rng.integers(0, 256, (8, side, side, 3), dtype=np.uint8) for side in (train, test))
    labels = np.arange(8) % classes
    np.savez(path, x_train=x, y_train=labels, x_test=x if copy else other, y_test=labels)
    return path


def lines(path):
    return notices([open_source(path, split) for split in list_splits(path)])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, None),
        ({"copy": True}, "warning: test holds the same images as train; its accuracy says nothing about new"),
        (
            {"train": 1, "test": 1},
            "warning: 8 of 8 train images looked at have a side of fewer than 8 pixels (1x1)",
        ),
        (
            {"test": 12},
            "warning: splits have images of different sizes (train 8x8, test 12x12); all are resized",
        ),
        ({"classes": 1}, "warning: there is one class, '0'; a classifier needs two"),
    ],
    ids=["nothing", "copies", "tiny", "sizes", "one class"],
)
def test_odd_arrays_get_a_line_from_every_command(tmp_path, capsys, options, line):
    path = arrays(tmp_path / "d.npz", **options)
    found = lines(path)
    if line is None:
        assert found == []
        return
    assert any(line in other for other in found)
    assert main(["data", "info", str(path)]) == 0
    assert line in capsys.readouterr().out
    assert main(["data", "check", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])["warnings"]
    # The check looks at all images: it finds the copies one by one.
    line = "warning: 8 of 8 test images are also in train" if "copy" in options else line
    assert any(line in other for other in printed)
    code = main(["train", str(path), *TINY, "--output", str(tmp_path / "runs")])
    printed = capsys.readouterr()
    if "classes" in options:
        assert code == 2
        assert "has one class, '0', and a classifier needs two" in printed.err
    else:
        assert code == 0
        # Lines are wrapped at the width of a terminal.
        said = " ".join((printed.out + printed.err).split())
        assert all(other in said for other in found)


def test_odd_files_get_a_line(tmp_path, capsys):
    path = MAKERS["folder"](tmp_path / "data")
    assert lines(path) == []
    shutil.rmtree(path / "val")
    shutil.copytree(path / "train", path / "val")
    (copied,) = lines(path)
    assert copied.startswith("warning: val holds the same images as train")
    assert main(["data", "check", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["warnings"] == ["warning: 6 of 6 val images are also in train"]
    for file in (path / "val").rglob("*.png"):
        Image.new("RGB", (1, 1)).save(file)
    tiny, sizes = lines(path)
    assert tiny.startswith("warning: 6 of 6 val images looked at have a side of fewer than 8 pixels (1x1)")
    assert "(train 32x32, val 1x1)" in sizes


def test_a_held_out_class_that_train_lacks_gets_a_line(tmp_path, capsys):
    path = arrays(tmp_path / "d.npz")
    np.savez(path, **dict(np.load(path)) | {"y_test": np.full(8, 7)})
    for command in ("check", "info"):
        assert main(["data", command, str(path)]) == 0
        assert "warning: test has images of class '7', train has none" in capsys.readouterr().out
    assert main(["train", str(path), *TINY, "--output", str(tmp_path / "runs")]) == 2


def test_photographs_of_many_sizes_and_bad_files_get_no_line(photo_folder):
    (photo_folder / "train/ape/000.jpg").write_bytes(b"")
    assert lines(photo_folder) == []


def test_one_folder_too_high_is_recognised(tmp_path, capsys):
    MAKERS["folder"](tmp_path / "outer/photos")
    assert main(["train", str(tmp_path / "outer"), *TINY, "--output", str(tmp_path / "runs")]) == 2
    printed = capsys.readouterr().err
    remedy = str(tmp_path / "outer/photos")
    assert f"has one class, 'photos', and a classifier needs two; did you mean {remedy}?" in printed
    assert main(["train", remedy, *TINY, "--output", str(tmp_path / "runs")]) == 0


def test_a_second_val_split_is_said_to_play_no_role(tmp_path, capsys):
    path = MAKERS["folder"](tmp_path / "data")
    shutil.copytree(path / "val", path / "validation")
    assert main(["train", str(path), *TINY, "--output", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr()
    assert "left out: split 'validation', which plays no role" in printed.out + printed.err


def test_a_batch_larger_than_the_data_is_cut_and_jitter_beside_a_policy_dropped_with_a_line(tmp_path, capsys):
    path = MAKERS["folder"](tmp_path / "data")
    words = [str(path), *TINY, "--output", str(tmp_path / "runs"), "--experiment", "r"]
    words += ["--aa", "v0", "--color-jitter", "0.4"]
    assert main(["train", *words, "--batch-size", "512"]) == 0
    printed = capsys.readouterr()
    assert "--batch-size 512 is cut to 6: there are 6 training images" in printed.out + printed.err
    assert "--color-jitter 0.4 has no effect beside --aa v0, as in timm" in printed.out + printed.err
    rows = (tmp_path / "runs/r/metrics.jsonl").read_text()
    # The same command again finds the same run, done.
    assert main(["train", *words, "--batch-size", "512"]) == 0
    assert (tmp_path / "runs/r/metrics.jsonl").read_text() == rows
