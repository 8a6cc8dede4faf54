"""Each source of randomness follows the seed, and none reads the stream of another."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import parse
from fathoms.data import ArraySource, CropOptions, open_source
from fathoms.data import counter_rng as rng
from fathoms.data.augment.policies import draw_layers, parse_policy
from fathoms.data.images.crops import draw_boxes
from fathoms.parts import DropPath
from fathoms.training.build import train_loader
from fathoms.training.distributed import World

COUNT, SIDE = 24, 20
QUIET = ("--recipe", "digits", "--crop", "whole", "--hflip", "0", "--train-interpolation", "bilinear")
# Every source alone: the flags that switch it on, and the stream that it may read.
SOURCES = {
    "order": ((), "order"),
    "crop": (("--crop", "resized", "--scale", "0.3", "0.6"), "crop"),
    "flip": (("--hflip", "0.5"), "crop"),
    "filter": (("--train-interpolation", "random"), "crop"),
    "policy": (("--aa", "rand-m9-mstd0.5"), "policy"),
    "jitter": (("--color-jitter", "0.4"), "jitter"),
    "erase": (("--reprob", "0.5", "--remode", "const"), "erase"),
    "noise": (("--reprob", "1", "--remode", "pixel"), "noise"),
    "mix": (("--mixup", "0.8", "--cutmix", "1", "--mixup-mode", "elem"), "mix"),
}


@pytest.fixture(scope="module")
def pixels():
    coarse = np.random.default_rng(0).integers(0, 256, (COUNT, 5, 5, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(image).resize((SIDE, SIDE))) for image in coarse])


@pytest.fixture(scope="module", params=["arrays", "files"])
def source(request, pixels, tmp_path_factory):
    """The images, each in a class of its own, kept on the device or decoded by workers."""
    if request.param == "arrays":
        return ArraySource("npz", "train", pixels, np.arange(COUNT), [f"{i:02d}" for i in range(COUNT)])
    root = tmp_path_factory.mktemp("photos")
    for number, image in enumerate(pixels):
        (root / f"{number:02d}").mkdir()
        Image.fromarray(image).save(root / f"{number:02d}" / "0.png")
    return open_source(root, "all")


@functools.cache
def job_of(name, seed):
    flags = [*QUIET, *SOURCES[name][0], "--seed", str(seed), "--batch-size", str(COUNT), "--workers", "2"]
    flags += ["--image-size", "16", "--patch-size", "4", "--in-channels", "3", "--device", "cpu"]
    return train_command.make_job(parse(train_command, "train", ["x.npz", *flags]))


def drawn(source, name, seed=0, epoch=0):
    """What a source of randomness draws in an epoch of one batch: the order, shares, or images by their number."""
    world = World(0, 1, torch.device("cpu"))
    (batch,) = train_loader(job_of(name, seed), source, 16, world).epoch(epoch)
    if name == "order":
        return batch.ids
    if name == "mix":
        return batch.targets.gather(1, batch.labels[:, None])
    return batch.images[batch.ids.argsort()]


@pytest.mark.parametrize("name", SOURCES)
def test_another_seed_or_epoch_draws_differently_and_the_same_draws_the_same(source, name):
    first = drawn(source, name)
    assert torch.equal(first, drawn(source, name))
    assert not torch.equal(first, drawn(source, name, seed=1))
    assert not torch.equal(first, drawn(source, name, epoch=1))
    # Seed and epoch are not added up: else a run's second epoch would be the first of the next seed's.
    assert not torch.equal(drawn(source, name, seed=1), drawn(source, name, epoch=1))


def test_a_stream_is_read_by_its_own_source_alone(source, monkeypatch):
    before = {name: drawn(source, name) for name in SOURCES}
    # Those of a replacement and of a transform of the user's own have no part here.
    for stream in set(rng.STREAMS) - {"own", "replace"}:
        with monkeypatch.context() as patch:
            patch.setitem(rng.STREAMS, stream, 1000)
            rng._epoch_key.cache_clear()
            moved = {name for name in SOURCES if not torch.equal(drawn(source, name), before[name])}
        rng._epoch_key.cache_clear()
        # The noise of an erased rectangle is drawn from that rectangle's key, on a stream of its own.
        inherited = {"noise"} if stream == "erase" else set()
        assert moved == {name for name, (_, own) in SOURCES.items() if own == stream} | inherited, stream


def test_draws_of_one_key_are_independent():
    """Place, size, flip and filter of a crop; operations, sign and filter of a policy."""
    count = 4000
    keys = rng.sample_keys(0, 0, "crop", np.arange(count))
    boxes, flip, cubic = draw_boxes(np.full((count, 2), 1000), keys, CropOptions(scale=(0.2, 0.3)))
    top, left, height, width = boxes.T
    crop = (top / (1000 - height), left / (1000 - width), height * width, height / width, flip, cubic)
    first, second = draw_layers(
        parse_policy("rand-m9-p0.99-mstd0.5"), rng.sample_keys(0, 0, "policy", np.arange(count))
    )
    policy = []
    for layer in (first, second):
        kinds, sign = np.zeros(count), np.full(count, np.nan)
        for number, (kind, rows) in enumerate(sorted(layer.rows.items())):
            kinds[rows] = number
            if kind in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
                sign[rows] = np.sign(layer.argument[rows])
        policy += [kinds, sign, layer.cubic]
    for draws in (crop, policy):
        for one, other in itertools.combinations(draws, 2):
            both = ~(np.isnan(one.astype(float)) | np.isnan(other.astype(float)))
            # Five standard errors of a correlation of independent numbers.
            assert abs(stats.spearmanr(one[both], other[both])[0]) < 5 / both.sum() ** 0.5


def state_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def dropped(trainer, epoch=0):
    """Which samples each drop-path drops in the first batch of an epoch."""
    kept = []
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            # A branch that starts at zero would not show what becomes of it.
            parameter.add_(0.01)

    def note(_module, inputs, output):
        assert inputs[0].flatten(1).any(1).all()
        kept.append((output == 0).flatten(1).all(1).tolist())

    hooks = [m.register_forward_hook(note) for m in trainer.model.modules() if isinstance(m, DropPath)]
    trainer.loop.stepper.accumulate(next(iter(trainer.context.data.train.epoch(epoch))), parts=1, first=True)
    for hook in hooks:
        hook.remove()
    return kept


def test_initial_weights_and_drop_path_follow_the_seed(digit_runs):
    flags = ("--drop-path", "0.5")
    trainers = {
        name: digit_runs.trainer(*flags, "--seed", seed, name=name)
        for name, seed in (("a", "0"), ("b", "0"), ("c", "1"))
    }
    start = {name: state_of(trainer) for name, trainer in trainers.items()}
    random = [key for key, value in start["a"].items() if len(value.unique()) > 2]
    assert any("stem" in key for key in random)
    assert any("blocks" in key for key in random)
    assert all(torch.equal(start["a"][key], start["b"][key]) for key in start["a"])
    assert not any(torch.equal(start["a"][key], start["c"][key]) for key in random)
    drops = {name: dropped(trainer) for name, trainer in trainers.items()}
    assert drops["a"] == drops["b"] != drops["c"]
    assert 0.3 < np.mean(drops["a"]) < 0.7
    # Branches do not drop the same samples; nor do epochs.
    assert len(set(map(tuple, drops["a"]))) == len(drops["a"])
    assert dropped(trainers["a"], epoch=1) != drops["a"]


def test_augmentation_and_a_teacher_leave_start_drops_and_order_as_they_are(digit_runs, digits_run):
    plain = digit_runs.trainer("--drop-path", "0.5", name="plain")
    start, drops = state_of(plain), dropped(plain)
    order = next(iter(plain.context.data.train.epoch(0))).ids
    more = {
        "augmented": ("--aa", "rand-m9-mstd0.5", "--reprob", "0.5", "--mixup", "0.8"),
        "taught": ("--teacher", str(digits_run), "--distillation-type", "hard"),
    }
    for name, flags in more.items():
        other = digit_runs.trainer("--drop-path", "0.5", *flags, name=name)
        assert all(torch.equal(value, start[key]) for key, value in state_of(other).items())
        assert torch.equal(next(iter(other.context.data.train.epoch(0))).ids, order)
        assert dropped(other) == drops
