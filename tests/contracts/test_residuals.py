"""The contract of residual methods. A new method gets these tests by being registered."""

from __future__ import annotations

import math

import pytest
import torch

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.parts import RESIDUALS, Block, LayerScale
from fathoms.parts.residuals import build_residual, layerscale_start


def built(name, depth=12, index=3, **options):
    return build_residual(name, 32, depth=depth, index=index, **{"factor": 0.25, **options})


def called(name, scale, x):
    """The method on a branch x; one that makes the update from branch and stream gets a stream of its own too."""
    if RESIDUALS.metadata(name).place != "update":
        return scale(x)
    generator = torch.Generator().manual_seed(1)
    return scale(x, torch.randn(x.shape, generator=generator).to(x.dtype))


@pytest.fixture(params=list(RESIDUALS))
def name(request):
    return request.param


def block_of(name, **options):
    placements = RESIDUALS.metadata(name).placements
    options = {"depth": 12, "residual": name, **options}
    return Block(32, 4, attn_placement=placements[0], mlp_placement=placements[0], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keeps_shape_and_dtype(name, dtype):
    for shape in ((2, 5, 32), (2, 3, 4, 32), (2, 2, 3, 4, 32)):
        x = torch.randn(shape, dtype=dtype)
        y = called(name, built(name), x)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)


def test_is_finite_at_extremes(name):
    assert called(name, built(name), torch.full((2, 5, 32), 1e4)).isfinite().all()


def test_gives_a_gradient_to_the_input_and_every_parameter(name):
    scale = built(name)
    x = torch.randn(2, 5, 32, requires_grad=True)
    called(name, scale, x).square().sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in scale.parameters())


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_an_init_value_is_obeyed_or_refused(name, value):
    if RESIDUALS.metadata(name).start is None:
        with pytest.raises(FathomsError, match=rf"residual '{name}' takes no init_value; leave it out"):
            built(name, init_value=value)
        return
    scale = built(name, init_value=value)
    assert all(parameter.eq(value).all() for parameter in scale.parameters())


def test_zero_init_means_zero_not_off():
    scale = RESIDUALS.build("layerscale", 8, init_value=0.0)
    assert not scale(torch.randn(2, 5, 8)).any()
    assert [name for name, _ in scale.named_parameters()] == ["gamma"]


def test_layerscale_keeps_its_contract():
    scale = LayerScale(768)
    assert torch.equal(scale.gamma, torch.full((768,), 1e-4))
    assert scale.flop_count(196) == 196 * 768


def test_layerscale_goes_by_the_depth_of_the_network_not_by_the_index():
    assert [layerscale_start(depth) for depth in (12, 18, 19, 24, 25, 36, 48)] == [
        0.1,
        0.1,
        *[1e-5] * 2,
        *[1e-6] * 3,
    ]
    for index in (0, 35):
        assert built("layerscale", depth=36, index=index).gamma.eq(1e-6).all()


def test_layerscale_weighs_in_float32_below_float16s_smallest_number():
    """1e-6 has 4 significant bits in float16; the product must be rounded once, at the end."""
    x = torch.full((8,), 1000.0, dtype=torch.float16)
    assert torch.allclose(LayerScale(8, 1e-6)(x).double(), torch.tensor(1e-3).double(), rtol=1e-3)


def test_method_values_are_those_of_the_papers():
    x = torch.ones(1, 32)
    expected = {
        "none": 1.0,
        "tfixup": 1.0,
        "layerscale": 0.1,
        "rezero": 0.0,
        "rezero_shared": 0.0,
        "skipinit": 0.0,
        "fixup": 1.0,
        "deepnorm": (2 * 12) ** 0.25,
        "layernorm_scaling": 4**-0.5,
        "completep": 0.25,
        "depth_mup": 0.25,
        "prores": 1.0,
    }
    rules = {name for name in RESIDUALS if RESIDUALS.metadata(name).place == "update"}
    assert expected.keys() | rules == set(RESIDUALS)
    for name, value in expected.items():
        assert torch.allclose(built(name)(x), torch.full_like(x, value)), name


def spread(weight):
    return weight.detach().float().square().mean().sqrt().item()


def test_weight_inits_are_those_of_the_papers():
    """Root mean square of each matrix, wide enough that 5 % is many standard errors."""
    dim, hidden, depth = 192, 768, 24
    square, wide = math.sqrt(2 / (2 * dim)), math.sqrt(2 / (dim + hidden))
    truncated = 0.02 * 0.9999
    tfixup, deepnorm = 0.67 * depth**-0.25, (8 * depth) ** -0.25
    expected = {
        "none": (truncated,) * 6,
        "layerscale": (truncated,) * 6,
        "layernorm_scaling": (truncated,) * 6,
        "completep": (truncated,) * 6,
        "depth_mup": (truncated,) * 6,
        "orthogonal": (truncated,) * 6,
        "mv_split": (truncated,) * 6,
        "prores": (truncated,) * 6,
        "rezero": (square, square, square, square, wide, wide),
        "rezero_shared": (square, square, square, square, wide, wide),
        "skipinit": (*(math.sqrt(2 / dim),) * 4, math.sqrt(2 / dim), math.sqrt(2 / hidden)),
        "fixup": (*(square * (2 * depth) ** (-1 / 6),) * 3, 0.0, wide * (2 * depth) ** -0.5, 0.0),
        "tfixup": (square, square, square * tfixup, square * tfixup, wide * tfixup, wide * tfixup),
        "deepnorm": (square, square, square * deepnorm, square * deepnorm, wide * deepnorm, wide * deepnorm),
    }
    assert expected.keys() == set(RESIDUALS)
    for name, values in expected.items():
        torch.manual_seed(0)
        placement = RESIDUALS.metadata(name).placements[0]
        block = Block(dim, 4, depth=depth, residual=name, attn_placement=placement, mlp_placement=placement)
        weights = [weight for _, weight in block.attn.roles() + block.mlp.roles()]
        for weight, value in zip(weights, values, strict=True):
            assert spread(weight) == pytest.approx(value, rel=0.05), name


def test_tfixup_starts_every_matrix_inside_the_bounds_of_its_paper_in_float64():
    """Xavier's uniform ends at sqrt(6 / (in + out)); a factor of sqrt(2) too many would leave it."""
    dim, depth = 384, 12
    torch.manual_seed(0)
    block = Block(dim, 6, depth=depth, residual="tfixup").double()
    block.reset_parameters()
    for role, weight in block.attn.roles() + block.mlp.roles():
        scale = 1.0 if role in ("q", "k") else 0.67 * depth**-0.25
        bound = scale * math.sqrt(6 / sum(weight.shape))
        assert 0.99 * bound < weight.abs().max() <= bound, role
        assert weight.detach().std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01), role


def test_fixup_shifts_every_linear_and_activation_and_has_no_other_biases():
    block = block_of("fixup", norm="none")
    names = {name for name, _ in block.named_parameters()}
    shifts = {f"{linear}.pre.shift" for linear in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert {*shifts, "mlp.act.0.shift"} <= names
    assert not any(name.endswith(".bias") for name in names)


def test_tfixup_starts_the_embeddings_with_the_factor_of_its_paper():
    """(9N)^-1/4 of what the tokens start from, at 12 blocks 0.31."""
    first = []
    for residual in ("none", "tfixup"):
        torch.manual_seed(0)
        sizes = {"image_size": 16, "patch_size": 4, "dim": 16, "heads": 2, "registers": 2, "num_classes": 3}
        model = ViT(ViTConfig(residual=residual, **sizes))
        first.append(model.embed(torch.ones(1, 3, 16, 16)))
    assert first[0].shape == (1, 19, 16)
    spread = [tokens.square().mean(dim=(0, 2)).sqrt() for tokens in first]
    assert (spread[1] / spread[0]).mean().item() == pytest.approx((9 * 12) ** -0.25, rel=0.2)


def test_rezero_shared_has_one_number_for_both_branches():
    block = block_of("rezero_shared")
    assert block.attn_join.scale is block.mlp_join.scale
    assert sum(name.endswith("alpha") for name, _ in block.named_parameters()) == 1
    assert sum(name.endswith("alpha") for name, _ in block_of("rezero").named_parameters()) == 2
