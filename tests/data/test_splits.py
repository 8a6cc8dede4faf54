"""The roles of splits: train, val and test of every kind of data set."""

import json
import shutil

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fathoms.data.sources.arrays import digits
from fathoms.data.sources.splits import READERS, open_held_out, open_roles, open_source, stratified
from fathoms.errors import ConfigError, FathomsError
from tiny_data import MAKERS


def arrays(path, **counts):
    """An .npz with so many images of four classes in each split."""
    made = {}
    for split, count in counts.items():
        made[f"x_{split}"] = np.random.default_rng(len(split)).integers(0, 255, (count, 8, 8, 3), np.uint8)
        made[f"y_{split}"] = np.arange(count) % 4
    np.savez(path, **made)
    return str(path)


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ({"train": 80, "val": 20, "test": 12}, {"train": 80, "val": 20, "test": 12, "val_share": 0.0}),
        ({"train": 80, "val": 20}, {"train": 80, "val": 20, "val_share": 0.0}),
        ({"train": 80, "test": 12}, {"train": 76, "val": 4, "test": 12, "val_share": 0.05}),
        ({"train": 80}, {"train": 72, "val": 8, "val_share": 0.1}),
    ],
)
def test_roles_follow_from_the_names_of_the_splits(tmp_path, counts, sizes):
    assert open_roles(arrays(tmp_path / "data.npz", **counts)).sizes() == sizes


def test_a_folder_plays_the_same_roles(photo_folder):
    assert open_roles(str(photo_folder)).sizes()["val_share"] == 0
    (photo_folder / "val").rename(photo_folder / "test")
    roles = open_roles(str(photo_folder))
    assert (roles.val.split, roles.test.split, roles.carved) == ("val", "test", 0.05)
    assert open_roles(str(photo_folder / "train")).test is None


def test_a_share_makes_val_of_train_and_the_held_out_split_the_test_set(tmp_path):
    path = arrays(tmp_path / "data.npz", train=80, val=20)
    roles = open_roles(path, 0.1)
    assert roles.sizes() == {"train": 72, "val": 8, "test": 20, "val_share": 0.1}
    assert open_roles(path, 0.0).val is None
    with pytest.raises(ConfigError, match="--val-share would not be used"):
        open_roles(arrays(tmp_path / "all.npz", train=80, val=20, test=12), 0.1)


def test_a_carved_val_is_stratified_disjoint_and_the_same_every_time(tmp_path):
    path = arrays(tmp_path / "data.npz", train=80, test=12)
    one, two = open_roles(path, 0.2), open_roles(path, 0.2)
    assert np.bincount(one.val.labels).tolist() == [4, 4, 4, 4]
    assert not set(one.val.indices) & set(one.train.indices)
    assert one.fingerprint() == two.fingerprint() != open_roles(path, 0.25).fingerprint()
    assert one.val.where(0) == f"train[{one.val.indices[0]}]"
    assert np.array_equal(one.train.images, open_source(path, "train").images[one.train.indices])


def test_the_carved_val_of_every_run_is_the_one_of_published_runs(tmp_path):
    """Apart from a run's seed: all seeds of a comparison, and runs of later versions, choose on the same images."""
    roles = open_roles(arrays(tmp_path / "data.npz", train=80, test=12), 0.1)
    indices = [16, 23, 30, 45, 46, 47, 65, 76]
    assert roles.split() == {"version": 1, "seed": 0, "share": 0.1, "val_indices": indices}
    assert [(role.kind, role.split) for role in roles[:3]] == [
        ("npz", "train"),
        ("npz", "val"),
        ("npz", "test"),
    ]


def test_a_subset_of_files_reads_and_names_the_files_it_stands_for(photo_folder):
    roles = open_roles(str(photo_folder), 0.25)
    whole = open_source(str(photo_folder), "train")
    index = int(roles.val.indices[3])
    assert roles.val.read(3) == whole.read(index)
    assert (roles.val.where(3), roles.val.size(3)) == (whole.where(index), whole.size(index))


def test_a_rare_class_keeps_an_image_to_train_on():
    kept, out = stratified(np.array([0, 0, 1, 2, 2, 2]), 0.9, 0)
    assert {0, 1, 2} <= set(np.array([0, 0, 1, 2, 2, 2])[kept])
    assert sorted([*kept, *out]) == list(range(6))


def test_measuring_takes_test_then_val_or_the_one_that_was_asked_for(photo_folder, tmp_path):
    assert open_held_out(str(photo_folder)).split == "val"
    assert open_held_out(str(photo_folder), "train").split == "train"
    assert open_held_out(arrays(tmp_path / "data.npz", train=8, val=8, test=8)).split == "test"


def test_measuring_takes_data_without_splits_whole(photo_folder):
    source = open_held_out(str(photo_folder / "train"))
    assert (source.split, len(source)) == ("all", 48)


def test_the_digits_are_built_in():
    roles = open_roles(None)
    assert (len(roles.train), len(roles.val), len(roles.test)) == (1367, 71, 359)
    assert open_held_out("digits").fingerprint() == roles.test.fingerprint()
    assert open_held_out("digits", "train").split == "train"
    with pytest.raises(FathomsError, match="no split is called 'val'"):
        open_held_out("digits", "val")


@pytest.mark.parametrize("kind", list(READERS))
def test_a_mistyped_split_gets_the_nearest_one_of_the_data(tmp_path, kind):
    path = str(MAKERS[kind](tmp_path))
    with pytest.raises(FathomsError, match="^--split: no split is called 'trian'; did you mean 'train'"):
        open_held_out(path, "trian")
    assert open_held_out(path, "train").split == "train"


def test_a_split_that_is_there_and_damaged_has_its_own_reason(tmp_path):
    path = tmp_path / "data.npz"
    arrays(path, train=8, test=8)
    kept = dict(np.load(path))
    np.savez(path, **{name: value for name, value in kept.items() if name != "y_test"})
    with pytest.raises(FathomsError, match="x_test has no labels"):
        open_held_out(str(path), "test")


@pytest.mark.parametrize("spoil", ["missing", "other length"])
def test_a_training_split_that_cannot_be_read_is_an_error_and_the_test_split_is_not_trained_on(
    tmp_path, spoil
):
    path = tmp_path / "data.npz"
    arrays(path, train=80, test=12)
    kept = dict(np.load(path))
    if spoil == "missing":
        kept["X_train"] = kept.pop("x_train")
    else:
        kept["y_train"] = kept["y_train"][:50]
    np.savez(path, **kept)
    with pytest.raises(FathomsError, match=r"no x_train with y_train|80 images for 50 labels"):
        open_roles(str(path))


def test_a_folder_of_test_images_alone_is_not_trained_on(photo_folder):
    shutil.rmtree(photo_folder / "train")
    (photo_folder / "val").rename(photo_folder / "test")
    with pytest.raises(FathomsError, match="there is no split 'train'; it has test"):
        open_roles(str(photo_folder))


def test_measuring_takes_the_val_split_that_the_run_carved(photo_folder, tmp_path):
    whole = str(photo_folder / "train")
    roles = open_roles(whole)
    (tmp_path / "split.json").write_text(json.dumps(roles.split()))
    measured = open_held_out(whole, run=tmp_path)
    assert (len(measured), measured.fingerprint()) == (len(roles.val), roles.val.fingerprint())
    (tmp_path / "split.json").write_text('{"val_indices": [100000]}')
    with pytest.raises(FathomsError, match="does not belong to this data"):
        open_held_out(whole, run=tmp_path)


def test_the_digits_are_those_of_scikit_learn():
    theirs = load_digits()
    images, labels = digits()
    assert torch.equal(images[:, 0], torch.from_numpy(theirs.images).float() / 8 - 1)
    assert torch.equal(labels, torch.from_numpy(theirs.target))


def test_a_changed_split_is_named_with_digits_that_differ(tmp_path):
    data = MAKERS["folder"](tmp_path / "data")
    shutil.copytree(data / "val", data / "test")
    before = open_roles(str(data))
    stored = before.fingerprint()
    path = next((data / "test").rglob("*.png"))
    path.write_bytes(path.read_bytes() + b"x")
    roles = open_roles(str(data))
    old, new = before.test.fingerprint()[:12], roles.test.fingerprint()[:12]
    assert old != new
    assert roles.changes(stored) == f"test {old} -> {new}"
    shutil.rmtree(data / "test")
    assert open_roles(str(data)).changes(stored) == "3 splits -> 2"
