"""A data set on the device: the same interface, the same promises as the loader."""

import numpy as np
import pytest
import torch

from fathoms.data import (
    ArraySource,
    Augment,
    AugmentOptions,
    CropOptions,
    DataError,
    DeviceLoader,
    MixOptions,
    Sampler,
)
from fathoms.data.device_loader import Ahead


@pytest.fixture
def source():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    return ArraySource("npz", "train", images, np.arange(50) % 5, list("abcde"))


def loader(source, **options):
    augment = Augment(
        AugmentOptions(aa="rand-m9-mstd0.5-inc1", reprob=0.25, mix=MixOptions(mixup=0.8, cutmix=1.0)),
        classes=5,
    )
    return DeviceLoader(source, Sampler(50, 10, seed=2), 16, CropOptions(**options), augment)


@pytest.mark.parametrize("mode", ["resized", "pad", "whole"])
def test_epochs_resume_anywhere(source, mode):
    whole = list(loader(source, crop=mode).epoch(1))
    rest = list(loader(source, crop=mode).epoch(1, start=3))
    assert len(whole) == 5
    assert all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets)
        for a, b in zip(whole[3:], rest, strict=True)
    )
    assert not torch.equal(whole[0].images, next(loader(source, crop=mode).epoch(2)).images)
    with pytest.raises(DataError, match="outside the epoch"):
        next(loader(source).epoch(0, start=9))


def test_batches_made_together_are_those_made_alone(source, monkeypatch):
    together = loader(source)
    # What a GPU does to launch less often: three batches, then the two that are left.
    monkeypatch.setattr(type(together), "_at_once", 3)
    for batch in together.epoch(1):
        alone = Ahead((), together._pieces(1, range(batch.number, batch.number + 1))).finish()[0]
        assert torch.equal(batch.images, alone.images)
        assert torch.equal(batch.targets, alone.targets)
        assert torch.equal(batch.ids, alone.ids)


class Watched(DeviceLoader):
    """A loader that works as on a GPU, two batches at a time, and notes what it begins."""

    _at_once, _ahead = 2, True

    def _pieces(self, epoch, numbers):
        self.begun = [*getattr(self, "begun", []), (epoch, numbers)]
        return super()._pieces(epoch, numbers)


def test_groups_begun_ahead_are_those_made_when_wanted(source):
    usual = loader(source)
    watched = Watched(source, usual.sampler, usual.size, usual.crop, usual.augment)
    # Left in the middle of an epoch, resumed in another, then to the end of it and into the next.
    next(watched.epoch(7))
    before = len(watched.begun)
    for epoch in (1, 2):
        for batch, other in zip(watched.epoch(epoch), usual.epoch(epoch), strict=True):
            assert (batch.epoch, batch.number) == (other.epoch, other.number)
            assert torch.equal(batch.images, other.images)
            assert torch.equal(batch.targets, other.targets)
            assert torch.equal(batch.ids, other.ids)
    # No group is made twice; the first group of the epoch after the last waits until it is asked for.
    groups = [range(2), range(2, 4), range(4, 5)]
    assert watched.begun[before:] == [(epoch, numbers) for epoch in (1, 2) for numbers in groups] + [
        (3, range(2))
    ]


def test_what_was_begun_for_another_size_is_not_handed_out(source, monkeypatch):
    growing = loader(source)
    monkeypatch.setattr(type(growing), "_ahead", True)
    assert len(list(growing.epoch(0))) == 5
    growing.set_size(24)
    assert next(growing.epoch(1)).images.shape[2:] == (24, 24)


def test_evaluation_hands_out_the_pixels_as_they_are(source):
    sampler = Sampler(50, 16, order="sequential")
    batches = list(DeviceLoader(source, sampler, 16).epoch(0))
    assert torch.equal(
        torch.cat([b.images for b in batches]), torch.from_numpy(source.images).permute(0, 3, 1, 2)
    )
    assert torch.cat([b.labels for b in batches]).tolist() == source.labels.tolist()
    larger = next(DeviceLoader(source, sampler, 24).epoch(0))
    assert larger.images.shape == (16, 3, 24, 24)


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_padding_shifts_by_at_most_four_pixels_and_flips_if_asked(source, flip):
    plain = DeviceLoader(source, Sampler(50, 50), 16, CropOptions(crop="pad", hflip=flip))
    batch = next(plain.epoch(0))
    for number, image in zip(batch.ids.tolist(), batch.images.permute(0, 2, 3, 1).numpy(), strict=True):
        image = image[:, ::-1] if flip else image
        padded = np.pad(source.images[number], ((4, 4), (4, 4), (0, 0)))
        windows = [padded[y : y + 16, x : x + 16] for y in range(9) for x in range(9)]
        assert any((window == image).all() for window in windows)


def test_an_epoch_is_cut_into_groups_of_nearly_one_size(source, monkeypatch):
    whole = loader(source)
    monkeypatch.setattr(type(whole), "_at_once", 4)
    assert [len(numbers) for numbers in whole._groups(0)] == [3, 2]
    assert whole._groups(5) == []
    assert len(list(whole.epoch(0))) == 5
    assert list(whole.epoch(0, start=5)) == []


class Failing(Watched):
    """One that fails once, in the piece of a group that is begun ahead."""

    left = 1

    def _pieces(self, epoch, numbers):
        pieces = super()._pieces(epoch, numbers)
        if numbers.start == 0:
            return (yield from pieces)
        yield
        if self.left:
            self.left -= 1
            raise RuntimeError("out of memory")
        return (yield from pieces)


def test_a_group_that_failed_half_way_is_made_again(source):
    usual = loader(source)
    failing = Failing(source, usual.sampler, usual.size, usual.crop, usual.augment)
    batches = failing.epoch(0)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(batches)
    for batch, other in zip(failing.epoch(0, start=2), usual.epoch(0, start=2), strict=True):
        assert torch.equal(batch.images, other.images)
