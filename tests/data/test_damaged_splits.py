"""A split that cannot be opened is an error with its reason, from every command; it never vanishes."""

import gzip
import json
import struct
import tracemalloc

import numpy as np
import pytest

from fathoms.cli.main import main
from fathoms.data import DataError, list_splits, open_source
from tiny_data import MAKERS

TINY = ["--recipe", "digits", "--depth", "1", "--dim", "16", "--heads", "2", "--in-channels", "3"]
TINY += ["--image-size", "32", "--patch-size", "8", "--epochs", "1", "--batch-size", "4", "--device", "cpu"]


def change(path, **arrays):
    """Replace arrays of an .npz; None removes one."""
    kept = dict(np.load(path)) | arrays
    np.savez(path, **{name: value for name, value in kept.items() if value is not None})


def cut(path, length=-100):
    path.write_bytes(path.read_bytes()[:length])


def grow(path):
    path.write_bytes(path.read_bytes() + b"x")


def relabel(path, at, value):
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(data)


DAMAGE = {
    "a cut shard": ("webdataset", lambda p: cut(p / "train-000000.tar", 700), "train-000000.tar"),
    "a shard of a pack": ("pack", lambda p: cut(p / "train-000000.tar"), "missing or not"),
    "pixels as fractions": (
        "npz",
        lambda p: change(p, x_train=np.zeros((6, 32, 32, 3))),
        "images.npz: x_train: images are float64, not uint8",
    ),
    "fewer labels": ("npz", lambda p: change(p, y_train=np.array([0, 1])), "6 images for 2 labels"),
    "objects as pixels": (
        "npz",
        lambda p: change(p, x_train=np.array([None] * 6)),
        "x_train holds Python objects",
    ),
    "no labels": ("npz", lambda p: change(p, y_train=None), "x_train has no labels; add y_train or remove"),
    "no images": ("npz", lambda p: change(p, x_train=None), "no x_train with y_train; it has"),
    "nothing in it": ("npz", lambda p: change(p, x_train=np.zeros((0, 8, 8), np.uint8)), "holds no images"),
    "no label in it": ("npz", lambda p: change(p, y_train=np.zeros(0, int)), "y_train is empty"),
    "one-hot labels": ("npz", lambda p: change(p, y_train=np.eye(6, 3)), "store class numbers (y.argmax(1))"),
    "a negative label": (
        "npz",
        lambda p: change(p, y_train=np.array([0, 1, 2, 0, 1, -1])),
        "y_train holds -1",
    ),
    "labels as fractions": (
        "npz",
        lambda p: change(p, y_train=np.zeros(6)),
        "y_train is float64; store whole",
    ),
    "a label too many": (
        "npz",
        lambda p: change(p, y_train=np.array([0, 1, 2, 0, 1, 7])),
        "images.npz: labels run to 7 for 3 classes",
    ),
    "a cut batch": (
        "cifar",
        lambda p: cut(p / "data_batch_3.bin"),
        "data_batch_3.bin: 2973 bytes are not a whole",
    ),
    "a batch gone": ("cifar", lambda p: (p / "data_batch_1.bin").unlink(), "data_batch_1.bin is missing"),
    "a label beyond the names": (
        "cifar",
        lambda p: relabel(p / "data_batch_2.bin", 0, 9),
        "labels run to 9 for 3 classes",
    ),
    "a cut idx file": ("idx", lambda p: cut(p / "train-images-idx3-ubyte"), "do not hold (6, 32, 32) values"),
    "an idx file too long": ("idx", lambda p: grow(p / "train-images-idx3-ubyte"), "more than the declared"),
    "an idx file of labels gone": (
        "idx",
        lambda p: (p / "train-labels-idx1-ubyte").unlink(),
        "train-labels-idx1-ubyte(.gz) is missing",
    ),
    "labels of other images": (
        "idx",
        lambda p: (p / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 2) + b"\0\1"),
        "6 images for 2 labels",
    ),
    "images cut out of a tar": ("tar-folder", lambda p: cut(p, 5000), "images.tar"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_training_split_is_an_error_of_every_command(damage, tmp_path, capsys):
    kind, spoil, message = DAMAGE[damage]
    path = MAKERS[kind](tmp_path)
    assert main(["data", "info", str(path)]) == 0
    spoil(path)
    capsys.readouterr()
    runs = tmp_path / "runs"
    for words in (["data", "info"], ["data", "check"], ["train", *TINY, "--output", str(runs)]):
        assert main([*words, str(path)]) == 2, words
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1
        assert "allow_pickle" not in printed
    assert not runs.exists()
    assert not list(tmp_path.rglob("fathoms-manifest.json"))


def test_a_damaged_test_split_is_an_error_of_validation(tmp_path, capsys):
    path = MAKERS["npz"](tmp_path)
    assert main(["train", str(path), *TINY, "--output", str(tmp_path), "--experiment", "run"]) == 0
    change(path, x_val=np.zeros((3, 32, 32, 3)))
    capsys.readouterr()
    assert main(["validate", "--checkpoint", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert "x_val: images are float64" in capsys.readouterr().err


def test_the_idx_splits_that_are_listed_open_by_their_names(tmp_path):
    path = MAKERS["idx"](tmp_path)
    assert list_splits(path) == ["train", "t10k"]
    assert [open_source(path, split).split for split in ("t10k", "test", "val")] == ["t10k"] * 3


def test_a_gzipped_idx_file_is_unpacked_no_further_than_its_header_says(tmp_path):
    """A bomb has no header of IDX, or declares less than it unpacks to; either way little of it is unpacked."""
    path = MAKERS["idx"](tmp_path)
    images = path / "train-images-idx3-ubyte"
    honest = images.read_bytes()
    images.unlink()
    for start, message in ((b"", "not an IDX file"), (honest, "more than the declared")):
        with gzip.open(f"{images}.gz", "wb") as file:
            file.write(start + bytes(64 << 20))
        with limited_reads() as read, pytest.raises(Exception, match=message):
            open_source(path)
        assert sum(read) < 1 << 20


def test_a_plain_idx_file_that_declares_more_than_it_holds_takes_no_memory(tmp_path):
    path = MAKERS["idx"](tmp_path)
    (path / "train-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, 60_000, 200, 200))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="do not hold"):
            open_source(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


class limited_reads:  # noqa: N801
    """Counts the bytes that come out of gzip files."""

    def __enter__(self):
        self.read, self.original = [], gzip.GzipFile.read

        def counted(file, size=-1):
            data = self.original(file, size)
            self.read.append(len(data))
            return data

        gzip.GzipFile.read = counted
        return self.read

    def __exit__(self, *_error):
        gzip.GzipFile.read = self.original


@pytest.mark.parametrize(
    "entry", [3, {}, {"shards": 3}, {"shards": [3]}, {"shards": [{"name": "/"}]}], ids=str
)
def test_a_pack_opens_its_training_split_whatever_the_index_says_of_another(entry, tmp_path):
    path = MAKERS["pack"](tmp_path)
    index = json.loads((path / "index.json").read_text())
    index["splits"]["val"] = entry
    (path / "index.json").write_text(json.dumps(index))
    assert len(open_source(path, "train")) == 6
    with pytest.raises(DataError):
        open_source(path, "val")
