"""Taper: norms that fade into others during fine-tuning."""

from __future__ import annotations

import pytest
import torch

from fathoms import FathomsError
from fathoms.surgery.swap.swap import swap_norms
from fathoms.surgery.swap.taper import Tapered, taper
from tiny_models import perturbed_vit as vit
from tiny_models import random_images as images


def test_taper_goes_from_the_old_norm_to_the_new_and_then_removes_the_old():
    model, old, new = vit(), vit(), vit()
    swap_norms(new, "learnable_scaler")
    fading = taper(model, 4)
    assert torch.allclose(model(images()), old(images()), atol=1e-6)
    middle = [model(images()) for _ in range(3) if fading.step()]
    assert not torch.allclose(middle[1], old(images()), atol=1e-3)
    assert sum(isinstance(module, Tapered) for module in model.modules()) == 5
    assert fading.progress == 0.75
    assert fading.step() == fading.step() == 1.0
    assert fading.done
    assert torch.allclose(model(images()), new(images()), atol=1e-6)
    assert model.state_dict().keys() == new.state_dict().keys()
    assert model.config.norm == "learnable_scaler"


def test_taper_trains_both_and_resumes_from_a_saved_model():
    model = vit()
    fading = taper(model, 10)
    fading.resume(4)
    model(images()).square().sum().backward()
    pair = model.norm
    assert pair.old.weight.grad is not None
    assert pair.new.a.grad is not None
    assert float(pair.t) == pytest.approx(0.4)
    twin = vit()
    again = taper(twin, 10)
    twin.load_state_dict(model.state_dict())
    again.resume(fading.taken)
    assert torch.equal(twin(images()), model(images()))


def test_taper_needs_at_least_one_update():
    with pytest.raises(FathomsError, match="steps=0: use whole updates"):
        taper(vit(), 0)
