"""Wrong arguments of accelerate, fold, swap_norms and taper: one line that says what to give, the model as it was."""

from __future__ import annotations

import copy

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
    "taper": lambda model: fathoms.taper(model, 5),
}


@pytest.mark.plain
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cait_s24_224", "'cait_s24_224' is a name; build the model first"),
        (nn.Linear, "Linear is a class; give a model that is built"),
        ({"weight": torch.zeros(1)}, "a dict is not a model"),
    ],
)
def test_what_is_not_a_model_is_named(name, given, message):
    with pytest.raises(FathomsError, match=f"^{name}: {message}"):
        CALLS[name](given)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (5, "a int is not a batch of images"),
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


@pytest.mark.parametrize("change", [fathoms.fold], ids=["fold"])
def test_a_model_whose_output_is_not_finite_is_not_called_a_fault_of_fathoms(change):
    model = vit()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(FathomsError, match="the model's output is not finite; check its weights"):
        change(model)


@pytest.mark.plain
@pytest.mark.parametrize("steps", [0, 1.5, "10"])
def test_a_taper_takes_whole_updates(steps):
    with pytest.raises(FathomsError, match="use whole updates"):
        fathoms.taper(vit(), steps)
