"""Nothing is lost in silence: a file is taken, or counted and named by kind; a folder without images says why."""

import io
import json
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from fathoms.cli.main import main
from fathoms.data import DataError, list_splits, open_source
from fathoms.data.sources.source import SUFFIXES, LeftOut, left_out_of
from tiny_data import MAKERS, files_of, tree, write_tar


def left(path):
    """Counts by kind over all splits."""
    total = left_out_of(*(open_source(path, split) for split in list_splits(path)))
    return {kind: count for kind, (count, _) in total.kinds.items()}


@pytest.mark.parametrize("kind", SUFFIXES)
def test_a_folder_takes_the_files_of_every_format_that_is_read(tmp_path, kind):
    for number, suffix in enumerate(SUFFIXES[kind]):
        for name in (f"{number}{suffix}", f"{number}b{suffix.upper()}"):
            (tmp_path / "cat").mkdir(exist_ok=True)
            buffer = io.BytesIO()
            Image.new("RGB", (9, 9)).save(buffer, kind)
            (tmp_path / "cat" / name).write_bytes(buffer.getvalue())
    source = open_source(tmp_path, "all")
    assert len(source) == 2 * len(SUFFIXES[kind])
    assert not source.left_out.kinds


def test_every_file_of_a_folder_is_taken_or_counted(photo_folder, capsys):
    ape = photo_folder / "train/ape"
    for name in ("notes.txt", "more.TXT", "photo.heic", "LICENSE", ".hidden.jpg", "._000.jpg"):
        (ape / name).write_bytes(b"x")
    shutil.copy(ape / "000.jpg", photo_folder / "train/loose.jpg")
    (photo_folder / "train/.ipynb_checkpoints").mkdir()
    shutil.copy(ape / "000.jpg", photo_folder / "train/.ipynb_checkpoints/000.jpg")
    (photo_folder / "train/linked").symlink_to(ape)
    (photo_folder / "train/dog").mkdir()
    (photo_folder / "labels.csv").write_text("x")
    (photo_folder / "spare/ape").mkdir(parents=True)
    (photo_folder / "val/ape/readme.md").write_text("x")
    assert len(open_source(photo_folder)) == 48
    expected = {
        ".txt": 2,
        ".heic": 1,
        "file without a suffix": 1,
        "hidden file": 2,
        "hidden folder": 1,
        "link to a folder": 1,
        "image outside of a class folder": 1,
        "class folder without images": 1,
        ".csv": 1,
        ".md": 1,
        "folder beside the splits": 1,
    }
    assert left(photo_folder) == expected
    for command in ("check", "info"):
        assert main(["data", command, str(photo_folder), "--json"]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert {kind: found["count"] for kind, found in json.loads(last)["left_out"].items()} == expected
        (line,) = [line for line in lines if line.startswith("left out: ")]
        assert line.startswith("left out: 2 × .txt (train/ape/more.TXT …), 2 × hidden file (")


@pytest.mark.parametrize("odd", ["empty", "linked", "hidden images", "no images"])
def test_a_class_folder_that_training_leaves_out_is_not_a_class_of_the_other_splits(photo_folder, odd):
    place = photo_folder / "train/0odd"
    if odd == "linked":
        place.symlink_to(photo_folder / "train/ape")
    else:
        place.mkdir()
        if odd == "hidden images":
            shutil.copytree(photo_folder / "train/ape", place / ".thumbnails")
        elif odd == "no images":
            (place / "notes.txt").write_text("x")
    train, val = open_source(photo_folder), open_source(photo_folder, "val")
    assert train.classes == val.classes == ("ape", "bee", "cat")
    assert val.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4


def test_a_class_whose_images_lie_deeper_is_a_class_of_every_split(photo_folder):
    (photo_folder / "train/ape").rename(photo_folder / "train/deep")
    (photo_folder / "train/ape").mkdir()
    (photo_folder / "train/deep").rename(photo_folder / "train/ape/deep")
    assert open_source(photo_folder, "val").classes == ("ape", "bee", "cat")


def test_what_a_check_writes_is_not_counted(photo_folder):
    assert main(["data", "check", str(photo_folder), "--near", "-1"]) == 0
    assert left(photo_folder) == {}
    # A folder without splits has its manifest among the classes.
    assert main(["data", "check", str(photo_folder / "val"), "--near", "-1"]) == 0
    assert left(photo_folder / "val") == {}


def test_training_says_what_it_left_out(tmp_path, capsys):
    MAKERS["folder"](tmp_path / "data")
    (tmp_path / "data/train/a/notes.txt").write_text("x")
    words = ["--recipe", "digits", "--depth", "1", "--dim", "16", "--heads", "2", "--in-channels", "3"]
    words += ["--image-size", "16", "--patch-size", "8", "--epochs", "1", "--device", "cpu"]
    assert main(["train", str(tmp_path / "data"), *words, "--output", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr()
    assert "left out: 1 × .txt (train/a/notes.txt)" in printed.out + printed.err


def test_every_member_of_a_tar_is_taken_or_counted(tmp_path):
    extra = [("train/a/x.txt", b""), ("train/loose.png", b""), ("notes.md", b""), ("other/1.png", b"")]
    write_tar(tmp_path / "d.tar", [*tree("train"), *tree("val"), *extra, ("val/b/x.txt", b"")])
    assert len(open_source(tmp_path / "d.tar")) == 6
    assert left(tmp_path / "d.tar") == {".txt": 2, "image outside of a class folder": 1, ".md": 1, ".png": 1}


def test_every_file_of_a_shard_is_taken_or_counted_and_a_mask_is_not_the_image(tmp_path):
    first, second = files_of("train")[:2]
    entries = [("0.seg.png", second), ("0.png", first), ("0.PNG", second), ("0.cls", b"0"), ("0.json", b"{}")]
    write_tar(tmp_path / "train-000000.tar", [*entries, ("1.npy", b""), ("1.cls", b"1")])
    (tmp_path / "shard.tar.gz").write_bytes(b"")
    (tmp_path / "other.tar").write_bytes(b"")
    (tmp_path / "classes.txt").write_text("a\nb\n")
    source = open_source(tmp_path)
    assert [source.read(i) for i in range(len(source))] == [first]
    assert left(tmp_path) == {".png": 2, ".json": 1, ".npy": 1, ".cls": 1, ".gz": 1, ".tar": 1}


@pytest.mark.parametrize("kind", ["npz", "idx", "cifar", "pack", "webdataset"])
def test_other_files_of_the_other_kinds_are_counted(tmp_path, kind):
    path = MAKERS[kind](tmp_path)
    assert left(path) == {}
    if kind == "npz":
        np.savez(path, **dict(np.load(path)), x_extra=np.zeros(3))
        assert left(path) == {"array": 1}
        return
    (path / "readme.html").write_text("x")
    (path / "sub").mkdir()
    assert left(path) == {".html": 1, "folder": 1}


def test_bad_images_that_packing_left_out_are_counted(photo_folder, tmp_path, capsys):
    (photo_folder / "train/cat/zero.jpg").write_bytes(b"")
    assert main(["data", "pack", str(photo_folder), str(tmp_path / "packed")]) == 1
    assert left(tmp_path / "packed") == {"bad image when it was packed": 1}
    assert main(["data", "info", str(tmp_path / "packed")]) == 0
    assert "left out: 1 × bad image when it was packed (train/cat/zero.jpg)" in capsys.readouterr().out


def test_names_out_of_a_data_set_are_printable_and_short():
    total = LeftOut()
    total.add_file("train/\x1b[2J.txt")
    total.add_file("x" * 500 + ".csv")
    for number in range(9):
        total.add_file(f"a.{number}")
    line = total.describe()
    assert line.isprintable()
    assert len(line) < 400
    assert line.endswith("5 × other kinds")


def test_an_empty_folder_loose_images_and_other_files_are_three_sentences(tmp_path):
    place = tmp_path / "data"
    place.mkdir()
    with pytest.raises(DataError, match="the folder is empty; put images there as CLASS/image.jpg"):
        open_source(place, "all")
    (place / "notes.txt").write_text("x")
    with pytest.raises(
        DataError, match=r"holds no images \(left out: 1 × \.txt \(notes\.txt\)\); images go to"
    ):
        open_source(place, "all")
    Image.new("RGB", (9, 9)).save(place / "1.png")
    with pytest.raises(
        DataError, match=r"its images \(1\) are not in class folders; move them into .*/data/CLASS/"
    ):
        open_source(place, "all")
    # The remedy, done.
    (place / "CLASS").mkdir()
    (place / "1.png").rename(place / "CLASS/1.png")
    assert open_source(place, "all").classes == ("CLASS",)


def test_a_split_folder_without_images_says_why(tmp_path):
    MAKERS["folder"](tmp_path)
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match=r"/val: the folder is empty"):
        open_source(tmp_path, "val")


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
def test_splits_in_capitals_are_not_taken_for_classes(tmp_path, packed):
    """As classes they would teach the model to tell the training images from the others."""
    path = MAKERS["folder"](tmp_path / "data")
    (path / "train").rename(path / "Train")
    if packed:
        with tarfile.open(tmp_path / "data.tar", "w") as archive:
            archive.add(path, arcname=".")
        path = tmp_path / "data.tar"
    with pytest.raises(DataError, match="folder 'Train' would be a class; rename it to 'train'"):
        list_splits(path)
    if not packed:
        (path / "Train").rename(path / "train")
        assert list_splits(path) == ["train", "val"]
