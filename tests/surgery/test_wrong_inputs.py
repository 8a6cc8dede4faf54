"""Wrong arguments of accelerate, fold, norms and swap_norms: one line that says what to give, the model as it was."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fathoms
from fathoms.errors import FathomsError
from tiny_models import perturbed_vit as vit
from tiny_models import random_images as images

CALLS = {
    "accelerate": fathoms.accelerate,
    "fold": fathoms.fold,
    "swap_norms": lambda model: fathoms.swap_norms(model, "dyt"),
    "norms": fathoms.norms,
}


@pytest.mark.plain
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cait_s24_224", "'cait_s24_224' is not a model; give an nn.Module that is built"),
        (
            nn.Linear,
            "<class 'torch.nn.modules.linear.Linear'> is not a model; give an nn.Module that is built",
        ),
        ({"weight": torch.zeros(1)}, "a dict is not a model"),
        (nn.Sequential(nn.LazyLinear(3)), "0.weight has no shape yet; run the model once first"),
        (torch.jit.ScriptModule(), "a scripted model cannot be changed"),
    ],
)
def test_what_is_not_a_model_is_named(name, given, message):
    with pytest.raises(FathomsError, match=f"^{name}: {message}"):
        CALLS[name](given)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (5, "a int is not a batch"),
        (images(2)[:0], "holds no images"),
        ([images(2), images(2) * float("nan")], "values that are not finite"),
    ],
)
def test_batches_that_cannot_be_used_leave_the_model_as_it_was(batches, message):
    model = vit()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FathomsError, match=message):
        fathoms.swap_norms(model, "learnable_scaler", calibrate=batches)
    assert model.state_dict().keys() == before.keys()


def test_a_model_whose_output_is_not_finite_is_not_called_a_fault_of_fathoms():
    model = vit()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(FathomsError, match="the model's output is not finite; check its weights"):
        fathoms.fold(model)


@dataclass
class Output:
    y: torch.Tensor


class Returns(nn.Module):
    def __init__(self, as_what):
        super().__init__()
        self.norm, self.fc, self.as_what = nn.LayerNorm(8), nn.Linear(8, 8), as_what
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.as_what(self.fc(self.norm(x)))


CHANGES = {
    "fold": lambda model, x: fathoms.fold(model, images=x)[1].difference,
    "swap_norms": lambda model, x: fathoms.swap_norms(model, "dyt", calibrate=x).output_change,
}


@pytest.mark.plain
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"to": None}, "no norm is called None; use "),
        ({"to": nn.LayerNorm}, "no norm is called <class"),
        ({"only": slice(0, 1)}, r"only=slice\(0, 1, None\) is no choice; give patterns"),
        ({"only": [0, "norm"]}, r"only=\[0, 'norm'\] is no choice"),
        (
            {"only": [0, 9]},
            r"only=\[0, 9\] holds a block without a norm; the blocks with norms are \[0\] to ",
        ),
    ],
)
def test_a_wrong_argument_of_a_swap_is_one_line(given, message):
    with pytest.raises(FathomsError, match=f"^swap_norms: {message}"):
        fathoms.swap_norms(vit(), **{"to": "dyt", **given})


def test_batches_that_do_not_fit_are_asked_for_by_the_word_of_a_swap():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    with pytest.raises(FathomsError, match="give its inputs as calibrate=, several as a tuple"):
        fathoms.swap_norms(model, "dyt", calibrate=torch.randn(8, 7))


@pytest.mark.parametrize("name", CHANGES)
def test_outputs_of_every_kind_are_compared_or_refused(name):
    x = torch.randn(8, 8)
    for as_what in (Output, lambda y: {"y": [y], "n": 3}, lambda y: (y, None)):
        assert CHANGES[name](Returns(as_what), x) > 0
    with pytest.raises(FathomsError, match=f"{name}: the model returns no floating-point tensors"):
        CHANGES[name](Returns(lambda y: y.argmax(-1)), x)


def test_a_model_without_memory_is_not_folded():
    with pytest.raises(FathomsError, match="fold: the model is on the meta device"):
        fathoms.fold(vit().to("meta"))
