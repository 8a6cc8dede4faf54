"""The coordinate check tells a parametrisation that carries over to other depths from one that does not."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.data.sources.arrays import digits
from fathoms.probes.coordinates import Slope, Trajectory, _fit, coordinate_check

SHAPE = ViTConfig(image_size=8, patch_size=4, in_channels=1, dim=64, heads=4, num_classes=10)
DEPTHS = (2, 4, 8, 16)


class Times(nn.Module):
    """Multiply by a fixed number."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def scaled(power):
    """A builder whose branches are multiplied by (2 / L)^power: CompleteP at 1, nothing at 0."""

    def build(depth):
        model = ViT(SHAPE.replace(depth=depth))
        for block in model.blocks:
            block.attn_join.scale = block.mlp_join.scale = Times((2 / depth) ** power)
        return model

    return build


def check(power, **options):
    images, labels = digits()
    return coordinate_check(scaled(power), DEPTHS, images[:16], labels[:16], **options)


def test_branches_over_depth_are_flat_and_plain_branches_grow():
    """The negative control: without scaling, and with the square root but not its learning rate, the rise grows."""
    right, none, half = (check(power) for power in (1.0, 0.0, 0.5))
    assert (right.verdict, none.verdict, half.verdict) == ("flat", "growing", "growing")
    assert abs(right.stream.value) < 0.15
    assert none.stream.value > 0.6
    assert right.stream.value < half.stream.value < none.stream.value


def test_random_numbers_and_gradients_of_the_caller_are_left_alone():
    torch.manual_seed(9)
    before = torch.get_rng_state()
    with torch.no_grad():
        first, second = check(1.0, steps=2, seeds=(0,)), check(1.0, steps=2, seeds=(0,))
    assert torch.equal(torch.get_rng_state(), before)
    assert first == second


def test_the_optimizer_can_be_chosen_and_json_holds_everything():
    made = []

    def sgd(model):
        made.append(model)
        return torch.optim.SGD(model.parameters(), lr=0.5)

    result = check(0.0, optimizer=sgd, steps=2, seeds=(0, 1))
    stored = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert len(made) == len(stored["trajectories"]) == 2 * len(DEPTHS)
    assert len(stored["trajectories"][0]["stream"]) == 3
    assert stored["stream"]["low"] <= stored["stream"]["slope"] <= stored["stream"]["high"]


def test_the_slope_is_the_exponent_of_the_rise_with_an_interval_over_the_seeds():
    sizes = (2, 4, 8, 16)
    runs = [
        Trajectory(size, seed, [1.0, 1.0 + 0.1 * size**power, 1.0], [0.0, 1.0], [2.0, 1.0])
        for seed, power in enumerate((0.4, 0.5, 0.6))
        for size in sizes
    ]
    slope = _fit(runs, "stream")
    # 4.3027 is Student's t for two degrees of freedom.
    assert slope.value == pytest.approx(0.5)
    assert slope.high - slope.value == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert Slope(-0.9, -1.0, -0.8).verdict == "vanishing"
    assert Slope(-0.1, -1.0, 0.8).verdict == Slope(0.9, -0.1, 1.9).verdict == "unclear"


def test_a_model_that_does_not_stay_finite_is_called_diverged():
    result = check(0.0, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e30), steps=3, seeds=(0,))
    assert result.verdict == "diverged"
    assert json.dumps(result.to_json(), allow_nan=False)


def test_one_size_gives_no_slope():
    images, labels = digits()
    with pytest.raises(FathomsError, match=r"sizes \[4, 4\] give no slope"):
        coordinate_check(scaled(1.0), (4, 4), images[:4], labels[:4])


def test_activations_that_end_in_nan_have_diverged():
    steps = [1.0, 2.0, math.nan]
    found = [Trajectory(size, 0, steps, steps, steps) for size in (2, 8)]
    assert math.isnan(found[0].rise("stream"))
    assert _fit(found, "stream").verdict == "diverged"
