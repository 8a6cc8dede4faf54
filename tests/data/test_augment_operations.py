"""Operations of a policy against timm's Pillow operation; tolerances stand in the tables."""

import numpy as np
import pytest
import torch
from PIL import Image

from fathoms.data.augment import per_image
from fathoms.data.augment.policies import Layer

timm_ops = pytest.importorskip("timm.data.auto_augment", reason="the extra 'timm' is not installed")
FILL = (124, 116, 104)


def operate(batch, kind, factor, cubic=False):
    """One operation on a whole batch."""
    everyone = np.arange(len(batch))
    layer = Layer({kind: everyone}, np.full(len(batch), float(factor)), np.full(len(batch), cubic))
    return per_image.apply_layer(batch.clone(), layer, torch.tensor(FILL, dtype=torch.uint8))


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    images = []
    for i, (height, width) in enumerate([(5, 7), (20, 20), (64, 64), (64, 64)]):
        coarse = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        images.append(coarse.resize((64, 64), Image.Resampling.BICUBIC if i else Image.Resampling.BILINEAR))
    # An image with a narrow range of values, and one with a single colour.
    images.append(Image.fromarray((np.asarray(images[1]) // 8 + 90).astype(np.uint8)))
    images.append(Image.new("RGB", (64, 64), (10, 200, 77)))
    return images


def as_batch(images):
    return (
        torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).contiguous()
    )


def difference(batch, images):
    expected = np.stack([np.asarray(image) for image in images]).astype(int)
    return np.abs(batch.permute(0, 2, 3, 1).numpy().astype(int) - expected)


def posterize(image, bits):
    # Pillow 13 refuses 0 bits; before, and here, nothing is left of the image.
    return timm_ops.posterize(image, bits) if bits else Image.new("RGB", image.size)


TABLE_CASES = [
    ("invert", 0, lambda i, _: timm_ops.invert(i), 0),
    *[("posterize", bits, lambda i, f: posterize(i, int(f)), 0) for bits in (0, 1, 3, 4, 8)],
    *[("solarize", level, lambda i, f: timm_ops.solarize(i, int(f)), 0) for level in (0, 1, 77, 128, 256)],
    *[("solarize_add", add, lambda i, f: timm_ops.solarize_add(i, int(f)), 0) for add in (0, 55, 110)],
    *[("brightness", f, timm_ops.brightness, 0) for f in (0.1, 0.73, 1.0, 1.9)],
    *[("contrast", f, timm_ops.contrast, 0) for f in (0.1, 0.37, 1.0, 1.63)],
    # The stretch is computed in float64 on both sides, fused here: one level where a product is whole.
    ("auto_contrast", 0, lambda i, _: timm_ops.auto_contrast(i), 1),
    ("equalize", 0, lambda i, _: timm_ops.equalize(i), 0),
]


@pytest.mark.parametrize(("name", "factor", "reference", "levels"), TABLE_CASES)
def test_table_operations_give_pillow_s_integers(samples, name, factor, reference, levels):
    found = difference(operate(as_batch(samples), name, factor), [reference(i, factor) for i in samples])
    assert found.max() <= levels
    assert (found > 0).mean() < 0.01


PLANE_CASES = [
    *[("rotate", f, timm_ops.rotate) for f in (-30.0, 0.5, 21.3)],
    *[("shear_x", f, timm_ops.shear_x) for f in (-0.3, 0.0, 0.21)],
    *[("shear_y", f, timm_ops.shear_y) for f in (-0.13, 0.3)],
    *[("translate_x", f, timm_ops.translate_x_rel) for f in (-0.45, 0.25, 0.31234)],
    *[("translate_y", f, timm_ops.translate_y_rel) for f in (-0.2, 0.45)],
]


@pytest.mark.parametrize("cubic", [False, True], ids=["bilinear", "bicubic"])
@pytest.mark.parametrize(("name", "factor", "reference"), PLANE_CASES)
def test_plane_operations_are_within_a_level_of_pillow_s(samples, name, factor, reference, cubic):
    resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    expected = [reference(i, factor, fillcolor=FILL, resample=resample) for i in samples]
    found = difference(operate(as_batch(samples), name, factor, cubic), expected)
    # Pillow computes in float64 and cuts off; float32 lands on the other side of a whole number now and
    # then. A pixel exactly on the border between inside and fill may fall either way.
    assert np.quantile(found, 0.999) <= 1
    assert found.mean() < 0.06


COLOUR_CASES = [
    *[("colour", f, timm_ops.color, 0) for f in (0.0, 0.3, 1.0, 1.9)],
    *[("sharpness", f, timm_ops.sharpness, 1) for f in (0.1, 1.0, 1.9)],
    # Three boxes each way, rounded after each: a rounding that falls the other way can add up.
    *[("gaussian_blur", f, timm_ops.gaussian_blur, 2) for f in (0.1, 0.7, 1.3, 2.0)],
]


@pytest.mark.parametrize(("name", "factor", "reference", "levels"), COLOUR_CASES)
def test_colour_operations_follow_pillow(samples, name, factor, reference, levels):
    found = difference(operate(as_batch(samples), name, factor), [reference(i, factor) for i in samples])
    assert found.max() <= levels
    assert found.mean() < 0.1


@pytest.mark.parametrize("factor", [-0.5, -0.2, 0.0, 0.1, 0.33])
def test_hue_follows_torchvision_s_pillow_path(samples, factor):
    functional = pytest.importorskip("torchvision.transforms.functional")
    found = difference(
        operate(as_batch(samples), "hue", factor), [functional.adjust_hue(i, factor) for i in samples]
    )
    # Hue is kept in a byte: rounding to the next one moves a saturated colour by up to six levels.
    assert found.max() <= 6
    assert found.mean() < 0.05


def test_each_sample_gets_its_own_operation_and_strength(samples):
    batch, fill = as_batch(samples), torch.tensor(FILL, dtype=torch.uint8)
    kinds = ["rotate", "", "brightness", "equalize", "rotate", "colour"]
    arguments = np.array([10.0, 0.0, 0.5, 0.0, -20.0, 0.2])
    cubic = np.array([True, False, False, False, False, False])
    rows = {kind: np.array([i for i, own in enumerate(kinds) if own == kind]) for kind in set(kinds) - {""}}
    together = per_image.apply_layer(batch.clone(), Layer(rows, arguments, cubic), fill)
    for i, kind in enumerate(kinds):
        own = {kind: np.array([0])} if kind else {}
        alone = Layer(own, arguments[i : i + 1], cubic[i : i + 1])
        assert torch.equal(together[i], per_image.apply_layer(batch[i : i + 1].clone(), alone, fill)[0])
    assert torch.equal(together[1], batch[1])
