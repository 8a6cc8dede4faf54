"""Mixup, cutmix and erasing: timm's distributions, exact targets."""

import numpy as np
import pytest
import torch

from fathoms.data import Augment, AugmentOptions, MixOptions, Refs, Sampler
from fathoms.data.augment.erase_and_mix import draw_mixture, draw_rectangles, erase, mix_images, normal_noise
from fathoms.data.counter_rng import generator, sample_keys
from fathoms.errors import ConfigError, UnknownNameError


def test_an_odd_batch_can_be_mixed():
    options = MixOptions(mixup=1.0, cutmix=1.0, mixup_mode="pair")
    mixture = draw_mixture(options, generator(0, 0, "mix", 0), 5, 8, 8)
    assert mix_images(torch.rand(5, 3, 8, 8), mixture).shape == (5, 3, 8, 8)
    assert (mixture.share == mixture.share[::-1]).all()


def test_mixing_needs_the_number_of_classes():
    with pytest.raises(ConfigError, match="^classes=0: "):
        Augment(AugmentOptions(mix=MixOptions(mixup=0.8)))


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (MixOptions, {"mixup": -1.0}, "--mixup -1.0: "),
        (MixOptions, {"cutmix": -0.5}, "--cutmix -0.5: "),
        (MixOptions, {"mixup_prob": 2.0}, "--mixup-prob 2.0: "),
        (MixOptions, {"mixup_switch_prob": -1.0}, "--mixup-switch-prob -1.0: "),
        (MixOptions, {"mixup_mode": "btch"}, "--mixup-mode: .* 'batch'"),
        (MixOptions, {"smoothing": 1.0}, "--smoothing 1.0: "),
        (AugmentOptions, {"reprob": 1.5}, "--reprob 1.5: "),
        (AugmentOptions, {"recount": 0}, "--recount 0: "),
        (AugmentOptions, {"remode": "pixl"}, "--remode: .* 'pixel'"),
        (AugmentOptions, {"train_interpolation": "bicbic"}, "--train-interpolation: .* 'bicubic'"),
        (AugmentOptions, {"std": (0.0, 1.0, 1.0)}, "--std "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_out_of_range_is_refused_by_the_name_of_its_flag(options, given, message):
    with pytest.raises((ConfigError, UnknownNameError), match=f"^{message}"):
        options(**given)


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_erasing_fills_the_rectangle_and_nothing_else(mode):
    images = torch.full((40, 3, 32, 32), 7.0)
    keys = sample_keys(0, 0, "erase", np.arange(40))
    boxes = draw_rectangles(keys, 0.5, 2, 32, 32)
    out = erase(images.clone(), boxes, mode, keys)
    noise = []
    for i in range(40):
        inside = torch.zeros(32, 32, dtype=torch.bool)
        for top, left, height, width in boxes[i]:
            inside[top : top + height, left : left + width] = True
        assert (out[i][:, ~inside] == 7.0).all()
        if inside.any():
            values = out[i][:, inside]
            noise.append(values.flatten())
            assert mode != "const" or (values == 0).all()
            assert mode != "rand" or len(values[0].unique()) <= 2
    if mode == "pixel":
        noise = torch.cat(noise)
        assert abs(noise.mean()) < 0.05
        assert abs(noise.std() - 1) < 0.05


def test_normalising_is_exact_and_keeps_to_the_dtype():
    augment = Augment(AugmentOptions(), train=False, dtype=torch.bfloat16)
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    refs = Refs(np.arange(2), np.zeros(2, int), np.arange(2))
    out, targets = augment.finish(images, torch.zeros(2, dtype=torch.int64), refs, 0, 0)
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert out.dtype == torch.bfloat16
    assert targets is None
    assert torch.equal(out, ((images / 255 - mean) / std).bfloat16())


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_mixes_the_same_samples_in_the_same_way(mode, world):
    options = AugmentOptions(mix=MixOptions(mixup=0.8, cutmix=1.0, mixup_mode=mode))
    augment = Augment(options, seed=3, classes=40)
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)

    def mixed(plan, step):
        refs = plan.batch(1, step)
        index = torch.from_numpy(refs.index)
        out = augment.finish(images[index], index % 40, refs, 1, step, plan.global_batch)
        return dict(zip(refs.position.tolist(), zip(*out, strict=True), strict=True))

    for step in (0, 2):
        alone = mixed(Sampler(40, 12, seed=1), step)
        together = {}
        for rank in range(world):
            together |= mixed(Sampler(40, 12 // world, seed=1, world=world, rank=rank), step)
        assert together.keys() == alone.keys()
        for place, (image, target) in alone.items():
            assert torch.equal(image, together[place][0])
            assert torch.equal(target, together[place][1])


def test_the_noise_of_every_possible_draw_is_finite_and_symmetric():
    steps = torch.cat([torch.arange(1000), torch.arange(2**24 - 1000, 2**24)])
    noise = normal_noise(steps.float() * 2.0**-24)
    assert noise.isfinite().all()
    assert torch.equal(noise, -noise.flip(0))
    assert 5.0 < noise.max() < 5.6
