"""timm's policy strings mean the same here: operations, magnitudes, probabilities."""

import random
from collections import Counter

import numpy as np
import pytest

from fathoms.data import AugmentOptions
from fathoms.data.augment.policies import LEVELS, draw_layers, parse_policy
from fathoms.data.counter_rng import sample_keys
from fathoms.errors import ConfigError, UnknownNameError

timm_ops = pytest.importorskip("timm.data.auto_augment", reason="the extra 'timm' is not installed")
KEYS = sample_keys(0, 0, "policy", np.arange(20_000))


def kinds_of(layer):
    """The kind of operation of each sample, "" for none."""
    kinds = np.full(len(layer.argument), "", dtype="<U16")
    for kind, rows in layer.rows.items():
        kinds[rows] = kind
    return kinds


@pytest.mark.parametrize("name", sorted(LEVELS))
@pytest.mark.parametrize("magnitude", [0.0, 2.2, 7.0, 10.0])
def test_a_magnitude_means_what_it_means_in_timm(name, magnitude, monkeypatch):
    level = timm_ops.LEVEL_TO_ARG[name]
    if level is None:
        return
    # timm draws a sign inside; both signs are compared. A blur of random radius is drawn in its operation.
    for toss, draw in ((0.1, 0.9), (0.9, 0.1)):
        monkeypatch.setattr(random, "random", lambda draw=draw: draw)
        (expected,) = level(magnitude, {"translate_pct": 0.45})
        ours = LEVELS[name].argument(np.array([magnitude]), np.array([toss]), np.array([1.0]))[0]
        if name == "Desaturate":
            expected = 1 - expected
        if name == "GaussianBlurRand":
            expected = 0.1 + 1.0 * (2 * expected - 0.1)
        assert ours == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "rand-m9-mstd0.5-inc1",
        "rand-m7-mstd0.5",
        "rand-m5-n3-p0.8-mmax12",
        "rand-m9-tweights",
        "rand-t3a-inc1",
        "rand-t3aw",
    ],
)
def test_the_string_is_read_as_timm_reads_it(text):
    ours, theirs = parse_policy(text), timm_ops.rand_augment_transform(text)
    expected = tuple((op.name, op.prob, op.magnitude) for op in theirs.ops)
    assert ours.layers == (expected,) * theirs.num_layers
    assert ours.choice == "apart"
    for op in theirs.ops:
        assert (ours.spread, ours.limit) == (op.magnitude_std, op.magnitude_max or 10)
    if theirs.choice_weights is None:
        assert ours.weights is None
    else:
        assert np.allclose(np.array(ours.weights) / np.sum(ours.weights), theirs.choice_weights)


@pytest.mark.parametrize("text", ["v0", "v0r", "original", "originalr-mstd0.5", "3a"])
def test_the_tables_of_autoaugment_are_timm_s(text):
    ours, theirs = parse_policy(text), timm_ops.auto_augment_transform(text)
    rows = [tuple((op.name, op.prob, op.magnitude) for op in pair) for pair in theirs.policy]
    assert list(zip(*ours.layers, strict=True)) == rows
    assert ours.choice == "together"
    assert ours.spread == theirs.policy[0][0].magnitude_std


def test_autoaugment_draws_one_pair_for_both_layers():
    first, second = (kinds_of(layer) for layer in draw_layers(parse_policy("v0"), KEYS))
    seen = Counter(zip(first, second, strict=True))
    # Row 9 is (invert 0.4, rotate 0.6), and inverting occurs nowhere else: nothing but rotation follows it.
    assert {after for before, after in seen if before == "invert"} == {"rotate", ""}
    assert sum(n for (before, _), n in seen.items() if before == "invert") == pytest.approx(
        len(KEYS) * 0.4 / 25, rel=0.25
    )
    assert seen["invert", "rotate"] == pytest.approx(len(KEYS) * 0.4 * 0.6 / 25, rel=0.3)


def test_weighted_sets_draw_no_operation_twice():
    policy = parse_policy("rand-m9-n3-p1-t3aw")
    kinds = np.stack([kinds_of(layer) for layer in draw_layers(policy, KEYS[:2000])], 1)
    first = Counter(kinds_of(draw_layers(policy, KEYS)[0]))
    total = sum(policy.weights)
    assert first["gaussian_blur"] / len(KEYS) == pytest.approx(6 / total, abs=0.02)
    assert first["invert"] / len(KEYS) == pytest.approx(1 / total, abs=0.01)
    # "colour" stands for two operations; every other name may occur once in a row.
    assert all(max(Counter(k for k in row if k != "colour").values(), default=0) == 1 for row in kinds)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rnd-m9", "did you mean 'rand'"),
        ("rand-q9", "no RandAugment option is called 'q'; use 'm'"),
        ("rand-m", "'m' is not an option; write rand-m9"),
        ("rand-m9-p2", "p is 0 to 1"),
        ("rand-tnothing", "no set of operations"),
        ("3a-m9", "takes only mstd"),
        ("v0-m9", "takes only mstd"),
        ("originl", "did you mean 'original'"),
        ("augmix-m5", "AugMix is not built in; use rand-m9"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(text, complaint):
    with pytest.raises((ConfigError, UnknownNameError), match=f"^--aa.*{complaint}"):
        AugmentOptions(aa=text)
