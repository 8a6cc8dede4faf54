"""The comparison of a folded model with the original: what it finds out, and the cause that it names."""

from __future__ import annotations

import re

import pytest
import timm
import torch
from torch import nn
from transformers import ViTMAEConfig, ViTMAEModel

from fathoms import FathomsError
from fathoms.surgery.accelerate import accelerate
from fathoms.surgery.fold import fold
from fathoms.surgery.swap import swap_norms
from tiny_models import random_images as images


class Scaled(nn.Module):
    """A norm off its start, and a linear that reads it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fc, self.other = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.fc(self.norm(x))


class ByBatch(Scaled):
    def __init__(self, takes_other):
        super().__init__()
        self.takes_other = takes_other

    def forward(self, x):
        return (self.other if self.takes_other(len(x)) else self.fc)(self.norm(x))


class Steep(Scaled):
    def forward(self, x):
        return torch.sin(1e4 * super().forward(x))


class Pairs(Scaled):
    def forward(self, x):
        return super().forward(x).view(2, -1, 8)


class Noisy(nn.Module):
    """A CaiT whose output is random."""

    def __init__(self):
        super().__init__()
        self.cait = timm.create_model("cait_xxs24_224", depth=1, img_size=32, num_classes=5)

    def forward(self, x):
        return self.cait(x) + 0.01 * torch.randn(len(x), 5)


def rows(count):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1))


def masking():
    config = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 48}
    return ViTMAEModel(ViTMAEConfig(**config, image_size=16, patch_size=4)).eval()


@pytest.mark.parametrize(
    ("takes_other", "given", "found"),
    [(lambda batch: batch > 4, 4, 5), (lambda batch: batch == 1, 5, 1)],
    ids=["more", "one"],
)
def test_a_linear_that_runs_at_another_batch_size_only_is_found_out(takes_other, given, found):
    message = (
        f"on a batch of {found} the folded model differs by .* though not on one of {given}: its forward"
    )
    with pytest.raises(FathomsError, match=message):
        fold(ByBatch(takes_other), images=rows(given))


def test_a_model_that_takes_some_batch_sizes_only_is_compared_at_those():
    _, report = fold(Pairs(), images=rows(4))
    assert len(report) == 1
    assert report.difference < 1e-5


class PadsWhereItMust(Scaled):
    """Windows of four tokens; zeros are added behind the norm where they do not come out even."""

    def forward(self, x):
        y = self.norm(x)
        more = -x.shape[1] % 4
        return self.fc(nn.functional.pad(y, (0, 0, 0, more)) if more else y).mean(1)


def test_a_fold_that_holds_at_some_sizes_only_says_at_which():
    model, x = PadsWhereItMust(), torch.randn(2, 8, 8)
    nn.init.ones_(model.norm.bias)
    folded, report = fold(model, images=x)
    assert report.difference < 1e-5
    assert not torch.allclose(folded(x[:, :6]), model(x[:, :6]), atol=1e-3)
    (said,) = report.notes
    assert re.findall(r"\(.*?\)", said) == ["(1, 9, 8)", "(1, 10, 8)", "(1, 7, 8)"]
    assert said.startswith("differs at inputs of (1, 9, 8) by 0.")
    assert report.sizes == ("(1, 4, 8)",)
    assert said in report.table()


def test_other_sizes_are_tried_on_copies():
    class Remembers(Scaled):
        """Its window shrinks with the shortest sequence that it has seen."""

        def __init__(self):
            super().__init__()
            self.window = 8

        def forward(self, x):
            self.window = min(self.window, x.shape[1])
            return super().forward(x)[:, : self.window]

    model = Remembers()
    folded, report = fold(model, images=torch.randn(2, 8, 8))
    assert "(1, 4, 8)" in report.sizes
    assert (model.window, folded.window) == (8, 8)


def test_a_fold_that_holds_everywhere_says_where_it_was_tried():
    _, report = fold(Scaled(), images=torch.randn(2, 8, 8))
    assert report.sizes == ("(1, 9, 8)", "(1, 10, 8)", "(1, 7, 8)", "(1, 4, 8)")
    assert f"agrees at inputs of {', '.join(report.sizes)}" in report.table()
    assert report.notes == ()


def test_a_model_of_two_dtypes_is_held_to_the_coarser():
    class Mixed(Scaled):
        def forward(self, x):
            return self.fc(self.norm(x.float()).bfloat16())

    model = Mixed()
    model.fc.bfloat16()
    _, report = fold(model, images=torch.randn(4, 8))
    assert 1e-4 < report.difference < 5e-2


def test_a_folded_module_keeps_its_hooks():
    model, seen = Scaled(), []
    model.norm.register_forward_hook(lambda *_: seen.append(1))
    folded, report = fold(model, images=rows(4))
    assert len(report) == 1
    seen.clear()
    folded(rows(4))
    assert seen == [1]


def test_the_rounding_of_a_model_is_not_called_a_fault_of_the_fold():
    message = r"differs by .* in float32 and by \d\.\de-1\d in float64: rounding of this model, not the fold"
    with pytest.raises(FathomsError, match=message):
        fold(Steep(), images=rows(4))
    folded, report = fold(Steep(), images=rows(4), verify=False)
    assert report.difference is None
    assert folded(rows(4)).isfinite().all()


def test_a_random_model_is_called_random():
    words = "the model is not deterministic: two runs on the same images differ by .* of the largest output"
    with pytest.raises(FathomsError, match=f"^fold: {words}.* or pass verify=False"):
        fold(masking())
    assert len(fold(masking(), verify=False)[1]) == 2
    with pytest.raises(FathomsError, match=f"^accelerate: {words}.* or leave it as it is"):
        accelerate(Noisy(), images=images(2, 32))
    model = masking()
    before = list(model.state_dict())
    with pytest.raises(FathomsError, match=f"^swap_norms: {words}.* or leave calibrate= out"):
        swap_norms(model, "dyt", calibrate=images(2))
    assert list(model.state_dict()) == before


def test_images_that_a_model_does_not_take_are_named():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=16)
    grey = images(2)[:, :1]
    for change in (lambda: swap_norms(model, "dyt", calibrate=[grey]), lambda: fold(model, images=grey)):
        with pytest.raises(
            FathomsError, match=r"the model fails on images of shape \(2, 1, 16, 16\) \(.*\); give"
        ):
            change()


def test_biases_that_a_fold_adds_are_not_called_saved():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 32, bias=False))
    table = fold(model, images=torch.ones(2, 4).cumsum(1))[1].table()
    assert "0 operations saved, 24 parameters added: biases where there were none" in table
    assert "-24" not in table
