"""A comparison of outputs says when it proved nothing, and looks behind a classifier or a branch that is zero."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.surgery.accelerate import OneQueryAttention, accelerate
from fathoms.surgery.fold import fold
from fathoms.surgery.swap import swap_norms
from fathoms.surgery.trial import zero_parameters
from tiny_models import SMALL, perturbed_vit, random_images

FIXUP = {"residual": "fixup", "norm": "learnable_scaler"}


def zero_head(**more):
    """A model that gives zero for every image, and so agrees with any other of its kind."""
    model = perturbed_vit(**more)
    nn.init.zeros_(model.head.weight)
    return model


def test_fold_looks_behind_a_classifier_that_is_zero():
    model = zero_head(norm="learnable_scaler")
    folded, report = fold(model)
    assert not folded.head.weight.any()
    assert report.difference > 0
    assert report.notes == ("zero, and so compared at random values too: head.weight",)
    assert report.notes[0] in report.table()
    assert zero_parameters(model) == ["head.weight"]


def test_fold_finds_a_wrong_fold_behind_a_zero_classifier(monkeypatch):
    module = importlib.import_module("fathoms.surgery.fold")
    right = module._folded

    def wrong(model, images):
        folded, report = right(model, images)
        with torch.no_grad():
            folded.blocks[0].mlp.fc1.weight.mul_(1.5)
        return folded, report

    monkeypatch.setattr(module, "_folded", wrong)
    with pytest.raises(FathomsError, match="the folded model differs"):
        fold(zero_head(norm="learnable_scaler"))


def test_fixup_s_zero_layers_are_woken_too_and_stay_zero():
    model = ViT(ViTConfig(**SMALL, **FIXUP))
    folded, report = fold(model)
    assert "head.weight" in zero_parameters(model)
    assert report.notes[0].startswith(
        "zero, and so compared at random values too: blocks.0.attn.proj.linear.weight, "
    )
    assert not folded.head.weight.any()


def test_swap_measures_its_change_behind_a_zero_classifier():
    model = zero_head()
    report = swap_norms(model, "dyt", calibrate=random_images())
    assert report.output_change > 1e-3
    assert "zero, and so compared at random values too: head.weight" in report.table()
    assert not model.head.weight.any()


def test_what_no_value_can_wake_is_said_to_prove_nothing():
    class Deaf(nn.Module):
        """Multiplies what it sees by a buffer of zeros."""

        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 2)
            self.register_buffer("gate", torch.zeros(2))

        def forward(self, x):
            return self.fc(self.norm(x)) * self.gate

    _, report = fold(Deaf(), images=torch.randn(3, 6))
    assert "the comparison proved nothing: the output is the same for every image" in report.table()
    swapped = swap_norms(Deaf(), "rmsnorm", how="keep", calibrate=torch.randn(3, 6))
    assert "the comparison proved nothing" in swapped.table()


def test_a_comparison_that_proved_something_has_no_note():
    assert fold(perturbed_vit())[1].notes == ()
    assert swap_norms(perturbed_vit(), "dyt", calibrate=random_images()).notes == ()


def test_accelerate_finds_a_wrong_replacement_behind_a_zero_classifier(monkeypatch):
    timm = pytest.importorskip("timm")
    model = timm.create_model("cait_xxs24_224", img_size=32, depth=1, num_classes=5).eval()
    nn.init.zeros_(model.head.weight)
    report = accelerate(model)
    assert "zero, and so compared at random values too: head.weight" in report.table()
    assert not model.head.weight.any()
    model = timm.create_model("cait_xxs24_224", img_size=32, depth=1, num_classes=5).eval()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.blocks_token_only[0].attn.proj.weight)
    monkeypatch.setattr(OneQueryAttention, "fast", lambda self, x: self.proj(x[:, :1]))
    left = dict(accelerate(model).left)
    assert left["blocks_token_only.0.attn"].startswith("it computes something else")
