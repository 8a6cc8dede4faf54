"""Transforms of torchvision in a loader: the same batches however they are made, and the same predictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.data import (
    Augment,
    AugmentOptions,
    DataError,
    ImageTransform,
    Loader,
    LoaderOptions,
    Sampler,
    open_source,
)
from fathoms.data.loader import CAN_FORK
from fathoms.errors import ConfigError
from fathoms.evaluating.predict import list_images, predict
from fathoms.evaluating.preprocessing import Preprocessing
from tiny_data import make_folder

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="processes are forked, which is for Linux"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

LAST = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
RANDOM = v2.Compose([v2.RandomResizedCrop(16), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4), *LAST])
PLAIN = v2.Compose([v2.Resize((16, 16)), *LAST, v2.Normalize([0.5] * 3, [0.25] * 3)])


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def loader(folder, function=RANDOM, workers=2, split="train", **more):
    source = open_source(folder, split)
    options = LoaderOptions(workers=workers, max_bad=0.5)
    return Loader(source, Sampler(len(source), 3), ImageTransform(function, 16, **more), options=options)


def batches(loader, epoch=0, start=0):
    found = list(loader.epoch(epoch, start))
    loader.close()
    return found


def test_random_transforms_give_the_same_batches_with_any_number_of_workers_and_after_a_resume(folder):
    before = torch.get_rng_state()
    first, second = batches(loader(folder, workers=1)), batches(loader(folder, workers=3))
    resumed = batches(loader(folder), start=1)
    assert torch.equal(torch.get_rng_state(), before), "the loop's own random numbers are left alone"
    assert len(first) == 2
    for a, b in zip([*first, first[1]], [*second, *resumed], strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
    assert first[0].images.shape == (3, 3, 16, 16)
    assert first[0].images.dtype == torch.float32
    images = {int(i): image for batch in first for i, image in zip(batch.ids, batch.images, strict=True)}
    again = {int(i): x for b in batches(loader(folder), 1) for i, x in zip(b.ids, b.images, strict=True)}
    assert not all(torch.equal(images[i], again[i]) for i in images), "another epoch draws other numbers"


def test_an_image_is_what_the_transform_alone_makes_of_it(folder):
    (batch,) = batches(loader(folder, PLAIN, split="val", train=False))
    source = open_source(folder, "val")
    for image, index in zip(batch.images, batch.ids.tolist(), strict=True):
        assert torch.equal(image, PLAIN(Image.open(folder / source.where(index)).convert("RGB")))


def test_a_bad_image_is_replaced_in_training_and_marked_in_evaluation(folder):
    sorted((folder / "train").rglob("*.png"))[0].write_bytes(b"not an image")
    sorted((folder / "val").rglob("*.png"))[0].write_bytes(b"not an image")
    assert all((batch.labels >= 0).all() for batch in batches(loader(folder)))
    (held_out,) = batches(loader(folder, PLAIN, split="val", train=False))
    assert (held_out.labels == -1).sum() == 1


def test_a_transform_that_gives_something_else_is_told_what_to_give(folder):
    with pytest.raises(DataError, match=r"gives torch.uint8 \(3, 16, 16\), not a float tensor .* ToDtype"):
        batches(loader(folder, v2.Compose([v2.Resize((16, 16)), v2.ToImage()])))


def test_what_does_not_go_with_a_transform_is_refused(folder):
    source = open_source(folder, "train")
    sampler, transform = Sampler(len(source), 3), ImageTransform(PLAIN, 16)
    with pytest.raises(ConfigError, match="leave augment out"):
        Loader(source, sampler, transform, Augment(AugmentOptions(), train=False))
    with pytest.raises(ConfigError, match="needs processes"):
        Loader(source, sampler, transform, options=LoaderOptions(worker_kind="threads"))
    with pytest.raises(ConfigError, match="without lambda"):
        ImageTransform(lambda image: image, 16)


def test_predictions_with_torchvisions_resize_are_those_of_the_card(folder):
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=16, heads=2, depth=1, num_classes=3)).eval()
    torch.nn.init.normal_(model.head.weight)
    files = list_images([folder / "val"])
    bicubic = v2.Resize((16, 16), interpolation=v2.InterpolationMode.BICUBIC)
    own = ImageTransform(v2.Compose([bicubic, *LAST, v2.Normalize([0.5] * 3, [0.25] * 3)]), 16)
    usual = Preprocessing(crop_pct=1.0, mean=(0.5,) * 3, std=(0.25,) * 3)
    names = ("a", "b", "c")
    ours = [row.probabilities for row in predict(model, files, classes=names, top=3, preprocessing=own)]
    theirs = [row.probabilities for row in predict(model, files, classes=names, top=3, preprocessing=usual)]
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    with pytest.raises(FathomsError, match="needs size=16"):
        next(predict(model, files, classes=names, top=3, preprocessing=ImageTransform(PLAIN, 8)))
