"""The rule for training and held-out splits."""

import pytest

from fathoms.data.sources.splits import open_held_out, open_splits
from fathoms.errors import ConfigError


def test_training_takes_the_training_split_and_the_first_held_out_one(photo_folder):
    train, held_out = open_splits(str(photo_folder))
    assert (train.split, held_out.split) == ("train", "val")
    (photo_folder / "val").rename(photo_folder / "test")
    assert open_splits(str(photo_folder))[1].split == "test"


def test_training_refuses_data_without_a_held_out_split(photo_folder):
    with pytest.raises(ConfigError, match=r"has no held-out split \(val, validation or test\); it has all"):
        open_splits(str(photo_folder / "train"))


def test_measuring_takes_the_held_out_split_or_the_one_that_was_asked_for(photo_folder):
    assert open_held_out(str(photo_folder)).split == "val"
    assert open_held_out(str(photo_folder), "train").split == "train"


def test_measuring_takes_data_without_splits_whole(photo_folder):
    source = open_held_out(str(photo_folder / "train"))
    assert (source.split, len(source)) == ("all", 48)


def test_the_digits_are_built_in():
    train, held_out = open_splits(None)
    assert (train.split, held_out.split) == ("train", "test")
    assert open_held_out("digits").fingerprint() == held_out.fingerprint()
