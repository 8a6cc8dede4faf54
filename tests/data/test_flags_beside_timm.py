"""Flags of augmentation that docs/coming_from.md calls the same: draws and pixels beside timm's own functions."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from fathoms.data import Augment, AugmentOptions, CropOptions, MixOptions, Refs, Sampler
from fathoms.data.augment.erase_and_mix import draw_mixture, draw_rectangles, erase, mix_images, soft_targets
from fathoms.data.augment.policies import LEVELS, draw_jitter, draw_layers, jitter_ranges, parse_policy
from fathoms.data.counter_rng import generator, sample_keys
from fathoms.data.images.crops import draw_boxes
from fathoms.data.images.pixels import evaluation_pixels

pytest.importorskip("timm.data", reason="the extra 'timm' is not installed")
COUNT = 3000


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def keys_of(stream, count=COUNT):
    return sample_keys(0, 0, stream, np.arange(count))


def alike(ours, theirs):
    """Whether two samples may be of one distribution; a test of this file would be wrong once in a thousand."""
    return stats.ks_2samp(np.asarray(ours, float), np.asarray(theirs, float)).pvalue > 1e-3


@pytest.mark.parametrize("size", [(375, 500), (500, 333), (40, 900)])
@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.5, 0.7), (1.0, 2.0))])
def test_scale_ratio_hflip_and_train_interpolation(size, scale, ratio):
    from timm.data.transforms import RandomResizedCropAndInterpolation

    sizes = np.tile(size, (COUNT, 1))
    ours, flips, cubic = draw_boxes(sizes, keys_of("crop"), CropOptions(scale=scale, ratio=ratio, hflip=0.2))
    image = Image.new("RGB", size[::-1])
    draw = RandomResizedCropAndInterpolation.get_params
    theirs = np.array([draw(image, scale, ratio) for _ in range(COUNT)])
    assert all(alike(ours[:, column], theirs[:, column]) for column in range(4))
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= np.array(size)).all()
    assert abs(flips.mean() - 0.2) < 0.03
    assert abs(cubic.mean() - 0.5) < 0.04
    for name in ("bilinear", "bicubic"):
        cubic = draw_boxes(sizes, keys_of("crop"), CropOptions(train_interpolation=name))[2]
        assert set(cubic.tolist()) == {name == "bicubic"}


@pytest.mark.parametrize(
    "text", ["rand-m9-mstd0.5-inc1", "rand-m7-n3-mstd0.5", "rand-m9-mmax9-mstd1", "v0", "3a"]
)
def test_aa(text):
    """Operations and their strengths, drawn by timm's own classes."""
    from timm.data import auto_augment

    def recorder(name):
        return lambda _, *arguments, **__: drawn.append((name, arguments))

    make = (
        auto_augment.rand_augment_transform
        if text.startswith("rand")
        else auto_augment.auto_augment_transform
    )
    transform = make(text, {"translate_pct": 0.45})
    for op in transform.ops if text.startswith("rand") else [op for pair in transform.policy for op in pair]:
        op.aug_fn = recorder(op.name)
    theirs: dict[str, list[float]] = {}
    for _ in range(COUNT):
        drawn: list = []
        transform(None)
        for name, arguments in drawn:
            theirs.setdefault(name, []).append(arguments[0] if arguments else 0.0)
    by_kind: dict[str, list[float]] = {}
    for name, values in theirs.items():
        kind = LEVELS[name].kind
        # timm's functions take the grey's share of saturation, and draw the radius of a blur themselves.
        values = [1 - v for v in values] if name == "Desaturate" else values
        by_kind.setdefault(kind, []).extend([] if name == "GaussianBlurRand" else values)
    ours: dict[str, list[float]] = {}
    for layer in draw_layers(parse_policy(text), keys_of("policy")):
        for kind, rows in layer.rows.items():
            ours.setdefault(kind, []).extend(layer.argument[rows])
    assert ours.keys() == by_kind.keys()
    count = Counter({LEVELS[name].kind: 0 for name in theirs})
    for name, values in theirs.items():
        count[LEVELS[name].kind] += len(values)
    for kind, values in ours.items():
        # Five standard errors of a difference of two counts.
        assert abs(len(values) - count[kind]) < 5 * (2 * count[kind]) ** 0.5 + 1, kind
        assert not by_kind[kind] or alike(values, by_kind[kind]), kind


def test_color_jitter():
    transforms = pytest.importorskip("torchvision.transforms")
    given = (0.4, 0.2, 0.3, 0.1)
    layers = draw_jitter(jitter_ranges(given), keys_of("jitter"))
    kinds = ("brightness", "contrast", "colour", "hue")
    theirs = transforms.ColorJitter(*given)
    drawn = [
        theirs.get_params(theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue)
        for _ in range(COUNT)
    ]
    for number, kind in enumerate(kinds):
        ours = np.concatenate([layer.argument[layer.rows[kind]] for layer in layers])
        assert len(ours) == COUNT
        assert alike(ours, [values[number + 1] for values in drawn])
    turn = {(kind, place): len(layer.rows[kind]) for place, layer in enumerate(layers) for kind in kinds}
    assert all(abs(count / COUNT - 1 / 4) < 0.04 for count in turn.values())


@pytest.mark.parametrize("aa", [None, "rand-m9-mstd0.5-inc1", "v0", "3a", "rand-m9-t3a"])
def test_color_jitter_beside_a_policy(aa):
    """timm drops it beside a policy other than a 3a; so do we, and the run says so."""
    pytest.importorskip("torchvision.transforms")
    from timm.data import create_transform

    transform = create_transform(32, is_training=True, auto_augment=aa, color_jitter=0.3, use_prefetcher=True)
    theirs = any(type(step).__name__ == "ColorJitter" for step in transform.transforms)
    assert (Augment(AugmentOptions(aa=aa, color_jitter=0.3)).ranges is not None) == theirs


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_reprob_remode_recount(mode, count):
    from timm.data.random_erasing import RandomErasing

    reprob, side, images = 0.4, 32, torch.full((COUNT, 3, 32, 32), 7.0)
    theirs = RandomErasing(reprob, mode=mode, max_count=count, device="cpu")(images.clone())
    keys = keys_of("erase")
    ours = erase(images.clone(), draw_rectangles(keys, reprob, count, side, side), mode, keys)
    masks = [(result[:, 0] != 7) for result in (ours, theirs)]
    assert abs(masks[0].any(2).any(1).float().mean() - masks[1].any(2).any(1).float().mean()) < 0.06
    assert alike(*(mask.flatten(1).sum(1) for mask in masks))
    for side_sums in ((mask.any(dim).sum(1) for mask in masks) for dim in (1, 2)):
        assert alike(*side_sums)
    if mode == "pixel":
        values = [result[result != 7][:4000] for result in (ours, theirs)]
    else:
        # Each rectangle of an image has a colour of its own.
        colours = [
            [sorted(set(image[0][own].tolist())) for image, own in zip(result, mask, strict=True)]
            for result, mask in zip((ours, theirs), masks, strict=True)
        ]
        numbers = [Counter(map(len, listed)) for listed in colours]
        assert numbers[0].keys() == numbers[1].keys()
        assert all(abs(numbers[0][n] - numbers[1][n]) < 5 * (2 * numbers[1][n]) ** 0.5 for n in numbers[1])
        values = [[value for listed in own for value in listed] for own in colours]
    assert alike(*values)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.2, 1.0)])
def test_mixup_cutmix_their_probabilities_and_mode(mode, mixup, cutmix):
    from timm.data.mixup import Mixup

    batch, rounds, side, classes = 8, 400, 24, 8
    theirs = Mixup(
        mixup, cutmix, prob=0.7, switch_prob=0.3, mode=mode, label_smoothing=0.1, num_classes=classes
    )
    options = MixOptions(
        mixup=mixup, cutmix=cutmix, mixup_prob=0.7, mixup_switch_prob=0.3, mixup_mode=mode, smoothing=0.1
    )
    # Image i has value i everywhere: its mean and its number of values say what became of it.
    images = torch.arange(float(batch))[:, None, None, None].expand(batch, 3, side, side).contiguous()
    labels = torch.arange(batch)
    found: dict[str, list] = {"ours": [], "theirs": []}
    for number in range(rounds):
        mixture = draw_mixture(options, generator(0, 0, "mix", number), batch, side, side)
        found["ours"].append((mix_images(images, mixture), soft_targets(labels, classes, 0.1, mixture)))
        found["theirs"].append(theirs(images.clone(), labels))
    shares, cuts = {}, {}
    for who, results in found.items():
        pixels, targets = (torch.stack(parts) for parts in zip(*results, strict=True))
        own = targets[:, labels, labels]
        # Pixels and targets hold the same share of the own image, and the rest is the opposite one's.
        weight = (own - 0.1 / classes) / 0.9
        expected = weight * labels + (1 - weight) * labels.flip(0)
        assert torch.allclose(pixels.mean((2, 3, 4)), expected.float(), atol=1e-4)
        assert torch.allclose(targets.sum(2), torch.ones(rounds, batch), atol=1e-5)
        cut = (pixels.flatten(2).amax(2) - pixels.flatten(2).amin(2)) > 0.5
        shares[who], cuts[who] = weight[:, : 1 if mode == "batch" else batch // 2], cut[:, 0]
    assert abs(cuts["ours"].float().mean() - cuts["theirs"].float().mean()) < 0.11
    assert alike(shares["ours"].flatten()[::4], shares["theirs"].flatten()[::4])
    symmetric = {
        who: all(
            torch.allclose(t[labels, labels], t.flip(0)[labels, labels.flip(0)], atol=1e-5)
            for _, t in results
        )
        for who, results in found.items()
    }
    assert symmetric["ours"] == symmetric["theirs"] == (mode != "elem")


class Dictated(np.random.Generator):
    """A generator that gives what it is told, for the draws of one cutmix."""

    def __init__(self, share, places):
        super().__init__(np.random.PCG64(0))
        self.share, self.places = share, list(places)

    def random(self, count):
        return np.zeros(count)

    def beta(self, _first, _second, count):
        return np.full(count, self.share)

    def integers(self, _low, _high, count):
        return np.full(count, self.places.pop(0))


@pytest.mark.parametrize("shape", [(48, 48), (33, 20)])
def test_boxes_of_cutmix_are_those_of_timm_pixel_by_pixel(shape, monkeypatch):
    """Also where their side is odd, which shares of means would hardly show."""
    from timm.data import mixup

    rng, odd = np.random.default_rng(0), 0
    for _ in range(500):
        share, places = rng.uniform(), [int(rng.integers(0, side)) for side in shape]
        odd += int(shape[0] * (1 - share) ** 0.5) % 2
        rest = iter(places)
        monkeypatch.setattr(mixup.np.random, "randint", lambda *_, rest=rest, **__: next(rest))
        theirs, left = mixup.cutmix_bbox_and_lam((3, *shape), share)
        ours = draw_mixture(MixOptions(cutmix=1.0), Dictated(share, places), 2, *shape)
        assert ours.box[0].tolist() == [int(edge) for edge in theirs]
        assert ours.share[0] == pytest.approx(left, abs=1e-12)
    assert 200 < odd < 300


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0, 1.2])
def test_crop_pct_and_interpolation(photo, crop_pct, interpolation):
    from timm.data import create_transform

    for shape in ((50, 80), (80, 50), (64, 64), (33, 200)):
        image = photo(5, *shape)
        reference = create_transform(48, crop_pct=crop_pct, interpolation=interpolation, use_prefetcher=True)
        expected = np.asarray(reference(image)).astype(int)
        ours = evaluation_pixels(np.asarray(image), 48, crop_pct, interpolation == "bicubic").numpy()
        assert ours.shape == expected.shape
        assert np.abs(ours - expected).mean() <= 0.1


def test_mean_and_std():
    from timm.data.loader import PrefetchLoader

    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    theirs = PrefetchLoader([(images, torch.zeros(4))], mean=mean, std=std, device=torch.device("cpu"))
    ((expected, _),) = theirs
    augment = Augment(AugmentOptions(mean=mean, std=std), train=False)
    refs = Refs(np.arange(4), np.zeros(4, int), np.arange(4))
    ours, _ = augment.finish(images, torch.zeros(4, dtype=torch.int64), refs, 0, 0)
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_aug_repeats(world):
    from timm.data.distributed_sampler import RepeatAugSampler

    size, batch = 1536, 64
    ours, theirs = [], []
    for rank in range(world):
        sampler = Sampler(size, batch, aug_repeats=3, world=world, rank=rank)
        ours += np.concatenate([sampler.batch(0, number).index for number in range(sampler.batches)]).tolist()
        theirs += list(RepeatAugSampler(range(size), world, rank, num_repeats=3))
        # The repeats of an image go to different ranks.
        if world == 3:
            assert all(len(set(own)) == len(own) for own in (ours[-size // 3 :], theirs[-size // 3 :]))
    for drawn in (ours, theirs):
        assert len(drawn) == size
        assert set(Counter(drawn).values()) == {3}
