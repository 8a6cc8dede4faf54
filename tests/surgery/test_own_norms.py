"""Norms of somebody's own in odd places: swapped by their formula, or listed with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fathoms
from fathoms import FathomsError


def off_start(module, seed=0):
    """Every vector away from ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return module.eval()


def batch(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 0.5


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_large_eps_is_the_new_norm_s_too(norm):
    model, x = nn.Sequential(off_start(norm(8, eps=0.5))), batch((4, 5, 8))
    expected, kind = model(x), norm.__name__.lower()
    fathoms.swap_norms(model, "learnable_scaler")
    fathoms.swap_norms(model, kind)
    assert not torch.allclose(model(x), expected, atol=1e-2)
    model = nn.Sequential(off_start(norm(8, eps=0.5)))
    assert [site.form.eps for site in fathoms.norms(model)] == [0.5]
    other = "rmsnorm" if kind == "layernorm" else "layernorm"
    fathoms.swap_norms(model, other)
    assert model[0].eps == 0.5


class Own(nn.Module):
    """A norm of somebody's own: what it makes of the normalised input and its one vector."""

    def __init__(self, formula, **inside):
        super().__init__()
        self.weight, self.formula = nn.Parameter(torch.ones(8)), formula
        for name, module in inside.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.formula(self, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize(
    ("formula", "why"),
    [
        (lambda s, u: (s.weight * u).clamp(-6, 6), "it computes none of the norms"),
        (lambda s, u: 0.5 * s.weight * u, "its gain is none of its own parameters"),
        (lambda s, u: s.weight.exp() * u, "its gain is none of its own parameters"),
        (lambda s, u: s.weight * u * (2 if s.training else 1), "it computes something else in training"),
        (
            lambda s, u: nn.functional.dropout(s.weight * u, 0.5, s.training),
            "it computes something else in training",
        ),
        (lambda s, u: s.weight * u * (1 if u.shape[1] < 16 else 2), "its gain is none of its own parameters"),
    ],
    ids=[
        "bounded",
        "halved",
        "exponential",
        "doubled in training",
        "dropped in training",
        "doubled where long",
    ],
)
def test_a_module_that_normalises_is_swapped_by_its_formula_or_listed_whatever_its_name(formula, why):
    model, x = nn.Sequential(nn.Linear(8, 8), Own(formula), nn.LayerNorm(8)), batch((4, 20, 8))
    report = fathoms.swap_norms(model, "dyt", how="keep", calibrate=x)
    assert [row.name for row in report] == ["2"]
    assert dict(report.left)["1"].startswith(why)
    assert isinstance(model[1], Own)


def test_a_dropout_inside_a_norm_is_kept():
    model, x = nn.Sequential(Own(lambda s, u: s.drop(s.weight * u), drop=nn.Dropout(0.5))), batch((4, 20, 8))
    fathoms.swap_norms(model, "learnable_scaler", how="keep", calibrate=x)
    assert 0.3 < (model.train()(x) == 0).float().mean() < 0.7
    assert not (model.eval()(x) == 0).any()


def test_code_that_asks_for_the_class_of_its_norm_is_found_out():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(self.norm(x) if isinstance(self.norm, nn.LayerNorm) else x)

    for how in ("keep", "calibrate"):
        model = Asks()
        words = "^norm: its code calls the new norm 0 times and the old one 1 times; leave it out with only="
        with pytest.raises(FathomsError, match=words):
            fathoms.swap_norms(model, "dyt", how=how, calibrate=batch((4, 5, 8)))
        assert isinstance(model.norm, nn.LayerNorm)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:FutureWarning")
def test_a_scripted_module_in_a_model_is_passed_over():
    model, x = nn.Sequential(nn.LayerNorm(8), torch.jit.trace(nn.GELU(), torch.zeros(1, 8))), batch((4, 8))
    assert len(fathoms.norms(model, images=x)) == 1
    assert not model[0]._forward_pre_hooks
    assert not fathoms.norms(model, images=x).notes


def test_a_function_called_beside_a_vector_is_listed():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x + nn.functional.layer_norm(x, (8,), self.weight)

    model = nn.Sequential(Adds(), nn.LayerNorm(8))
    assert dict(fathoms.norms(model, images=batch((4, 8))).left)["0"].startswith(
        "calls layer_norm as a function"
    )


def test_weights_made_in_every_pass_are_no_hindrance():
    with pytest.warns(FutureWarning, match="weight_norm"):
        first = nn.utils.weight_norm(nn.Linear(8, 8))
    model, x = nn.Sequential(first, nn.LayerNorm(8), nn.Linear(8, 8)), batch((8, 8))
    model(x).sum().backward()
    assert len(fathoms.swap_norms(model, "rmsnorm", calibrate=x)) == 1
    assert len(fathoms.fold(model, images=x)[1]) == 1


def test_a_norm_of_one_channel_stays():
    model = nn.Sequential(nn.Linear(8, 1), nn.LayerNorm(1), nn.Linear(1, 8), nn.LayerNorm(8))
    left = dict(fathoms.norms(off_start(model), images=batch((4, 5, 8))).left)
    assert left == {"1": "its output does not depend on its input"}
