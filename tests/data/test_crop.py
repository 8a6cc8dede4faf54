"""Random crops as timm draws them, resizing as Pillow does it, and the evaluation transform of timm."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from fathoms.data import CropOptions, choose_decoder, open_source
from fathoms.data.counter_rng import sample_keys
from fathoms.data.images.crops import draw_boxes
from fathoms.data.images.pixels import (
    PixelLayout,
    as_words,
    evaluation_pixels,
    ragged,
    resize,
    resize_boxes,
)
from fathoms.errors import FathomsError


def boxes_for(sizes, options=None, seed=0):
    sizes = np.asarray(sizes)
    keys = sample_keys(seed, 0, "crop", np.arange(len(sizes)))
    return draw_boxes(sizes, keys, options or CropOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": "resize"}, "--crop: no crop is called 'resize'; did you mean 'resized'?"),
        ({"scale": (0.0, 1.0)}, "--scale 0.0 1.0: must be two rising shares of the area, in (0, 1]"),
        ({"ratio": (2.0, 1.0)}, "--ratio 2.0 1.0: must be two rising positive numbers"),
        ({"crop_padding": -1}, "--crop-padding -1: use 0 or more"),
        ({"hflip": 2.0}, "--hflip 2.0: use 1 or less"),
        (
            {"train_interpolation": "cubic"},
            "--train-interpolation: no filter is called 'cubic'; did you mean 'bicubic'?",
        ),
    ],
)
def test_an_option_out_of_range_is_refused_by_the_name_of_its_flag(options, message):
    with pytest.raises(FathomsError, match=f"^{re.escape(message)}$"):
        CropOptions(**options)
    assert CropOptions(crop_padding=0, hflip=0.0, scale=(1.0, 1.0), ratio=(1.0, 1.0))


def test_a_box_is_the_same_alone_and_among_many():
    """More than a few images draw their first try alone; most of these need another."""
    sizes = np.random.default_rng(0).integers((8, 60), (12, 300), (200, 2))
    options, keys = CropOptions(train_interpolation="bicubic"), sample_keys(0, 0, "crop", np.arange(200))
    many = draw_boxes(sizes, keys, options)
    alone = [draw_boxes(sizes[[i]], keys[[i]], options) for i in range(200)]
    assert all((a == np.concatenate(b)).all() for a, b in zip(many, zip(*alone, strict=True), strict=True))
    assert many[2].shape == (200,)
    assert many[2].all()


def test_of_a_very_long_image_the_middle_is_taken_as_long_as_the_ratio_allows():
    assert boxes_for([(10, 1000), (1000, 10)])[0].tolist() == [[0, 493, 10, 13], [493, 0, 13, 10]]


@pytest.mark.parametrize("size", [24, 64, 150])
def test_a_ragged_batch_is_resized_as_pillow_resizes_each_image(photo, size):
    images = [
        np.asarray(photo(i, h, w))
        for i, (h, w) in enumerate([(100, 140), (60, 50), (32, 32), (301, 213), (7, 9)])
    ]
    flat, offset, sizes = ragged(images)
    boxes, flips, cubic = boxes_for(sizes, seed=4)
    out = resize_boxes(
        as_words(torch.from_numpy(flat)), PixelLayout(offset, sizes[:, 1], sizes, boxes, flips, cubic), size
    )
    for i, (top, left, height, width) in enumerate(boxes):
        resample = Image.Resampling.BICUBIC if cubic[i] else Image.Resampling.BILINEAR
        crop = Image.fromarray(images[i][top : top + height, left : left + width]).resize(
            (size, size), resample
        )
        expected = np.asarray(crop)[:, ::-1] if flips[i] else np.asarray(crop)
        found = np.abs(out[i].permute(1, 2, 0).numpy().astype(int) - expected)
        # Both have weights of fixed point, torch fewer digits: a level in a few pixels of a hundred, two in hardly any.
        assert found.max() <= 2
        assert found.mean() < 0.05


def test_a_shifted_crop_is_padded_with_black(photo):
    image = np.asarray(photo(0, 32, 32))
    flat, offset, sizes = ragged([image])
    place = PixelLayout(
        offset, sizes[:, 1], sizes, np.array([[-3, 2, 32, 32]]), np.array([False]), np.array([True])
    )
    expected = np.zeros((32, 32, 3), np.uint8)
    expected[3:, :30] = image[:29, 2:]
    assert (
        resize_boxes(as_words(torch.from_numpy(flat)), place, 32)[0].permute(1, 2, 0).numpy() == expected
    ).all()


def test_a_shift_leaves_something_of_a_tiny_image():
    boxes, _, _ = boxes_for([(3, 5)] * 200, CropOptions(crop="pad", crop_padding=4))
    assert set(boxes[:, 0]) == {-2, -1, 0, 1, 2}
    assert set(boxes[:, 1]) == set(range(-4, 5))


def test_a_pixel_outside_the_box_never_matters(photo):
    image = np.asarray(photo(1, 50, 60)).copy()
    box = np.array([[10, 12, 20, 25]])
    outs = []
    for value in (0, 255):
        changed = np.full_like(image, value)
        changed[10:30, 12:37] = image[10:30, 12:37]
        flat, offset, sizes = ragged([changed])
        place = PixelLayout(offset, sizes[:, 1], sizes, box, np.array([True]), np.array([True]))
        outs.append(resize_boxes(as_words(torch.from_numpy(flat)), place, 16))
    assert torch.equal(*outs)


def test_resize_on_the_cpu_is_pillow_s(photo):
    image = photo(3, 120, 90)
    for cubic, resample in ((True, Image.Resampling.BICUBIC), (False, Image.Resampling.BILINEAR)):
        expected = np.asarray(image.resize((70, 50), resample)).astype(int)
        found = np.abs(resize(np.asarray(image), 50, 70, cubic).permute(1, 2, 0).numpy() - expected)
        assert found.max() <= 2
        assert found.mean() < 0.1


def test_photographs_for_evaluation_agree_with_timm_s_within_the_promise(photograph_tar):
    create_transform = pytest.importorskip(
        "timm.data", reason="the extra 'timm' is not installed"
    ).create_transform
    source = open_source(photograph_tar(300, val=16), "val")
    reference = create_transform(224, crop_pct=0.9, interpolation="bicubic", use_prefetcher=True)
    decoder, found = choose_decoder(), []
    for index in range(len(source)):
        data = source.read(index)
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(reference(image.convert("RGB"))).astype(int)
        found.append(np.abs(evaluation_pixels(decoder.decode(data), 224, 0.9).numpy() - expected).mean())
    assert max(found) <= 1.5
    assert np.mean(found) < 0.1
