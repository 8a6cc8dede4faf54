"""Crops: drawn as timm draws them; the validation picture is timm's pixel for pixel, nearly."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from fathoms.data import CropOptions, choose_decoder, open_source
from fathoms.data.counter_rng import sample_keys
from fathoms.data.crop.packed_rgb import as_words
from fathoms.data.crop.pixel_layout import Places
from fathoms.data.crop.random_crop import draw_boxes, evaluation_geometry
from fathoms.data.crop.resize import evaluation_pixels, resize
from fathoms.data.device.resize import ragged, resize_boxes
from fathoms.errors import ConfigError, UnknownNameError


def boxes_for(sizes, options=None, seed=0):
    sizes = np.asarray(sizes)
    keys = sample_keys(seed, 0, "crop", np.arange(len(sizes)))
    return draw_boxes(sizes, keys, options or CropOptions())


@pytest.mark.parametrize("size", [(375, 500), (500, 333), (32, 32), (40, 900)])
def test_random_crops_are_distributed_as_timm_s(size):
    transforms = pytest.importorskip("timm.data.transforms", reason="the extra 'timm' is not installed")
    height, width = size
    ours, flips, cubic = boxes_for([size] * 3000)
    random.seed(0)
    image = Image.new("RGB", (width, height))
    draw = transforms.RandomResizedCropAndInterpolation.get_params
    theirs = np.array([draw(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(3000)])
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= np.array(size)).all()
    assert abs(flips.mean() - 0.5) < 0.05
    assert abs(cubic.mean() - 0.5) < 0.05


def test_options_are_checked():
    with pytest.raises(UnknownNameError, match="did you mean 'resized'"):
        CropOptions(mode="resize")
    with pytest.raises(ConfigError, match=r"data\.scale"):
        CropOptions(scale=(0.0, 1.0))
    with pytest.raises(UnknownNameError, match="did you mean 'bicubic'"):
        CropOptions(interpolation="cubic")


@pytest.mark.parametrize("size", [24, 64, 150])
def test_a_ragged_batch_is_resized_as_pillow_resizes_each_picture(photo, size):
    pictures = [
        np.asarray(photo(i, h, w))
        for i, (h, w) in enumerate([(100, 140), (60, 50), (32, 32), (301, 213), (7, 9)])
    ]
    flat, offset, sizes = ragged(pictures)
    boxes, flips, cubic = boxes_for(sizes, seed=4)
    out = resize_boxes(
        as_words(torch.from_numpy(flat)), Places(offset, sizes[:, 1], sizes, boxes, flips, cubic), size
    )
    for i, (top, left, height, width) in enumerate(boxes):
        resample = Image.Resampling.BICUBIC if cubic[i] else Image.Resampling.BILINEAR
        crop = Image.fromarray(pictures[i][top : top + height, left : left + width]).resize(
            (size, size), resample
        )
        expected = np.asarray(crop)[:, ::-1] if flips[i] else np.asarray(crop)
        found = np.abs(out[i].permute(1, 2, 0).numpy().astype(int) - expected)
        # Pillow's weights are fixed-point: one level, in a few pixels of a hundred where the slope is whole.
        assert found.max() <= 1
        assert found.mean() < 0.05


def test_a_shifted_crop_is_padded_with_black(photo):
    picture = np.asarray(photo(0, 32, 32))
    flat, offset, sizes = ragged([picture])
    place = Places(
        offset, sizes[:, 1], sizes, np.array([[-3, 2, 32, 32]]), np.array([False]), np.array([True])
    )
    expected = np.zeros((32, 32, 3), np.uint8)
    expected[3:, :30] = picture[:29, 2:]
    assert (
        resize_boxes(as_words(torch.from_numpy(flat)), place, 32)[0].permute(1, 2, 0).numpy() == expected
    ).all()


def test_a_shift_leaves_something_of_a_tiny_picture():
    boxes, _, _ = boxes_for([(3, 5)] * 200, CropOptions(mode="pad", padding=4))
    assert set(boxes[:, 0]) == {-2, -1, 0, 1, 2}
    assert set(boxes[:, 1]) == set(range(-4, 5))


def test_a_pixel_outside_the_box_never_matters(photo):
    picture = np.asarray(photo(1, 50, 60)).copy()
    box = np.array([[10, 12, 20, 25]])
    outs = []
    for value in (0, 255):
        changed = np.full_like(picture, value)
        changed[10:30, 12:37] = picture[10:30, 12:37]
        flat, offset, sizes = ragged([changed])
        place = Places(offset, sizes[:, 1], sizes, box, np.array([True]), np.array([True]))
        outs.append(resize_boxes(as_words(torch.from_numpy(flat)), place, 16))
    assert torch.equal(*outs)


def test_resize_on_the_cpu_is_pillow_s(photo):
    picture = photo(3, 120, 90)
    for cubic, resample in ((True, Image.Resampling.BICUBIC), (False, Image.Resampling.BILINEAR)):
        expected = np.asarray(picture.resize((70, 50), resample)).astype(int)
        found = np.abs(resize(np.asarray(picture), 50, 70, cubic).permute(1, 2, 0).numpy() - expected)
        assert found.max() <= 2
        assert found.mean() < 0.1


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0, 1.2])
@pytest.mark.parametrize("shape", [(50, 80), (80, 50), (64, 64), (33, 200)])
def test_the_validation_picture_is_timm_s(photo, shape, crop_pct):
    create_transform = pytest.importorskip(
        "timm.data", reason="the extra 'timm' is not installed"
    ).create_transform
    picture = photo(5, *shape)
    reference = create_transform(48, crop_pct=crop_pct, interpolation="bicubic", use_prefetcher=True)
    expected = np.asarray(reference(picture)).astype(int)
    ours = evaluation_pixels(np.asarray(picture), 48, crop_pct).numpy()
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).mean() <= 0.1


def test_geometry_keeps_the_middle():
    assert evaluation_geometry(375, 500, 224, 0.875) == (256, 341, 16, 58)


def test_real_validation_pictures_agree_with_timm_s_within_the_promise(shared_file):
    create_transform = pytest.importorskip(
        "timm.data", reason="the extra 'timm' is not installed"
    ).create_transform
    source = open_source(shared_file("pet_photos_original.tar"), "val")
    reference = create_transform(224, crop_pct=0.9, interpolation="bicubic", use_prefetcher=True)
    decoder, found = choose_decoder(), []
    for index in range(0, len(source), 8):
        data = source.read(index)
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(reference(image.convert("RGB"))).astype(int)
        found.append(np.abs(evaluation_pixels(decoder.decode(data), 224, 0.9).numpy() - expected).mean())
    assert max(found) <= 1.5
    assert np.mean(found) < 0.1


def test_a_fixed_model_scores_the_same_on_both_pipelines(shared_file):
    linear_model = pytest.importorskip("sklearn.linear_model")
    create_transform = pytest.importorskip(
        "timm.data", reason="the extra 'timm' is not installed"
    ).create_transform
    path = shared_file("clothing_photos.tar")
    reference, decoder = (
        create_transform(32, crop_pct=0.9, interpolation="bicubic", use_prefetcher=True),
        choose_decoder(),
    )

    def timm_features(source, rows):
        out = []
        for index in rows:
            with Image.open(io.BytesIO(source.read(index))) as image:
                out.append(np.asarray(reference(image.convert("RGB"))).ravel() / 255)
        return np.array(out)

    train, test = open_source(path, "train"), open_source(path, "test")
    rows = np.random.default_rng(0).permutation(len(train))[:700].tolist()
    model = linear_model.RidgeClassifier(alpha=300.0).fit(timm_features(train, rows), train.labels[rows])
    theirs = model.score(timm_features(test, range(len(test))), test.labels)
    ours = np.array(
        [
            evaluation_pixels(decoder.decode(test.read(i)), 32, 0.9).numpy().ravel() / 255
            for i in range(len(test))
        ]
    )
    assert theirs > 0.3
    assert abs(model.score(ours, test.labels) - theirs) <= 0.003
