"""CIFAR from where people have it: torchvision by the lines of docs/data.md, and the Hub's columns as they are."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from fathoms.data import DataError, list_splits, open_source
from tiny_data import files_of

DOCS = Path(__file__).parents[2] / "docs/data.md"


def write_downloads(root, kind, images, labels, names):
    """The files that torchvision leaves after a download: the Python version of CIFAR."""
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    key = "labels" if kind.__name__ == "CIFAR10" else "fine_labels"
    for listed in (kind.train_list, kind.test_list):
        for part, own in zip(listed, np.array_split(np.arange(len(images)), len(listed)), strict=True):
            planes = images[own].transpose(0, 3, 1, 2).reshape(len(own), -1)
            (folder / part[0]).write_bytes(pickle.dumps({"data": planes, key: labels[own].tolist()}))
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: names}))


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_the_lines_of_the_page_make_a_data_set_of_torchvision_s_files(tmp_path, monkeypatch, name):
    cifar = pytest.importorskip("torchvision.datasets.cifar", reason="the extra 'timm' is not installed")
    # Of the real files only the checksums are known here.
    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    labels, names = np.arange(20) % 4, ["ape", "bee", "cat", "dog"]
    write_downloads(tmp_path / "downloads", getattr(cifar, name), images, labels, names)
    (lines,) = re.findall(r"```python\n([^`]*torchvision.datasets import CIFAR10[^`]*)```", DOCS.read_text())
    exec(lines.replace("CIFAR10", name), {})
    train, test = (open_source(tmp_path / "cifar10.npz", split) for split in ("train", "test"))
    assert train.classes == test.classes == tuple(names)
    for source in (train, test):
        assert np.array_equal(source.images, images)
        assert source.labels.tolist() == labels.tolist()


def test_of_the_hub_s_cifar100_the_fine_labels_are_taken(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra 'data' is not installed")
    fine, coarse = (datasets.ClassLabel(names=names) for names in (list("abc"), ["all"]))
    features = datasets.Features({"img": datasets.Image(), "fine_label": fine, "coarse_label": coarse})
    files = files_of("train")
    rows = {
        "img": [{"bytes": data, "path": None} for data in files],
        "fine_label": [0, 1, 2] * 2,
        "coarse_label": [0] * 6,
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    source = open_source(tmp_path / "saved", "all")
    assert source.classes == ("a", "b", "c")
    assert source.labels.tolist() == [0, 1, 2] * 2
    assert [source.read(i) for i in range(6)] == files


def test_the_binary_form_is_read_with_its_names_and_all_of_its_batches(tmp_path):
    x, y = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8), np.arange(10) % 4
    planes = x.transpose(0, 3, 1, 2).reshape(10, -1)
    for hundred in (False, True):
        # CIFAR-100 has a coarse label before the fine one.
        labels = [np.full(10, 9), y] if hundred else [y]
        record = np.concatenate([np.stack(labels, 1).astype(np.uint8), planes], 1)
        folder = tmp_path / str(hundred)
        folder.mkdir()
        files = ["train.bin"] if hundred else [f"data_batch_{i}.bin" for i in range(1, 6)]
        for name, rows in zip(files, np.array_split(record, len(files)), strict=True):
            (folder / name).write_bytes(rows.tobytes())
        (folder / ("test.bin" if hundred else "test_batch.bin")).write_bytes(record[:3].tobytes())
        listing = "fine_label_names.txt" if hundred else "batches.meta.txt"
        (folder / listing).write_text("one\ntwo\nthree\nfour\n\n")
        train, test = open_source(folder), open_source(folder, "val")
        assert np.array_equal(train.images, x)
        assert train.labels.tolist() == y.tolist()
        assert np.array_equal(test.images, x[:3])
        assert (train.classes, list_splits(folder)) == (("one", "two", "three", "four"), ["train", "test"])


def test_the_python_version_is_refused_with_a_hint(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x04N.")
    with pytest.raises(DataError, match="get CIFAR's 'binary version'"):
        list_splits(tmp_path)
