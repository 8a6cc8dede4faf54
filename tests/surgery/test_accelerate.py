"""Somebody else's CaiT, faster on the same parameters."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn

from fathoms import FathomsError
from fathoms.surgery.accelerate import accelerate
from fathoms.surgery.faster import FusedTalkingHeads, OneQueryAttention
from fathoms.surgery.fold import fold


def cait(**options):
    torch.manual_seed(0)
    model = timm.create_model("cait_xxs24_224", img_size=32, depth=2, num_classes=5, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def images(batch=3):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_same_answers_gradients_and_names():
    model = cait()
    plain = copy.deepcopy(model)
    report = accelerate(model)
    assert [row[1:] for row in report.rows] == [
        ("TalkingHeadAttn", "FusedTalkingHeads"),
        ("TalkingHeadAttn", "FusedTalkingHeads"),
        ("ClassAttn", "OneQueryAttention"),
        ("ClassAttn", "OneQueryAttention"),
    ]
    assert report.difference < 1e-5
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.load_state_dict(plain.state_dict())
    for each in (model, plain):
        each.train()
        each(images()).square().sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4), name
    assert "FusedTalkingHeads" in report.table()
    assert report.to_json()["left"] == ()


def test_dropout_of_attention_is_left_to_the_original():
    model = cait(attn_drop_rate=0.1)
    report = accelerate(model)
    assert all(row[2] == "OneQueryAttention" for row in report.rows)
    assert [reason for _, reason in report.left] == [
        "it drops attention with probability 0.1, which no kernel does"
    ] * 2


def test_class_attention_without_biases_and_with_dropped_probabilities():
    """Dropout is the same function of the same probabilities, so with one seed both drop alike."""
    model = cait(qkv_bias=False, attn_drop_rate=0.5)
    old = model.blocks_token_only[0].attn
    old.fused_attn = False
    new = OneQueryAttention(old).train()
    old.train()
    x = torch.randn(2, 7, 192)
    torch.manual_seed(3)
    expected = old(x)
    torch.manual_seed(3)
    # The maps have one axis more in the original; the numbers drawn for them come in the same order.
    assert torch.allclose(new(x), expected, rtol=1e-4, atol=1e-4)


def test_an_accelerated_model_folds_and_copies():
    model = cait()
    accelerate(model)
    folded, report = fold(model)
    assert report.difference < 1e-5
    assert torch.equal(copy.deepcopy(folded)(images()), folded(images()))
    assert any(isinstance(module, FusedTalkingHeads) for module in folded.modules())


def test_bfloat16_stays_bfloat16():
    model = cait().bfloat16()
    accelerate(model)
    assert model(images().bfloat16()).dtype == torch.bfloat16


def test_nothing_to_replace_is_an_error():
    with pytest.raises(FathomsError, match="Linear has nothing to replace; no talking-heads"):
        accelerate(nn.Linear(3, 3))
    model = cait()
    accelerate(model)
    with pytest.raises(FathomsError, match="Cait has nothing to replace"):
        accelerate(model)


def test_a_wrong_replacement_is_taken_back(monkeypatch):
    model = cait()
    before = model(images())
    monkeypatch.setattr(FusedTalkingHeads, "forward", lambda _, x: x)
    with pytest.raises(FathomsError, match="the model is as it was"):
        accelerate(model)
    assert torch.equal(model(images()), before)
