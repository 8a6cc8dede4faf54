"""Parameter groups: weight decay and layer decay."""

from __future__ import annotations

import pytest
import torch

import fathoms
from fathoms import FathomsError, ViT, ViTConfig


def test_groups_keep_every_parameter_once_and_say_why():
    model = fathoms.create_model("cait_xxs24_224", depth=2, num_classes=10)
    groups = fathoms.param_groups(model, weight_decay=0.05)
    listed = [parameter for group in groups for parameter in group["params"]]
    assert {id(parameter) for parameter in listed} == {id(parameter) for parameter in model.parameters()}
    assert len(listed) == len(list(model.parameters()))
    decayed = {name for group in groups if group["weight_decay"] for name in group["names"]}
    assert decayed == {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and name not in ("position.table", "readout.queries")
    }
    table = groups.table()
    assert "blocks.0.attn_join.scale.gamma" in table
    assert "marked _no_weight_decay" in table
    assert len(table.splitlines()) == 1 + len(listed)
    torch.optim.AdamW(groups, lr=1e-3)


@pytest.mark.parametrize("readout", ["cls", "class_attention"])
def test_layer_decay_falls_from_the_head_to_the_stem(readout):
    model = ViT(ViTConfig(image_size=32, dim=16, heads=2, depth=3, readout=readout, num_classes=5))
    scales = {}
    for group in fathoms.param_groups(model, 0.1, layer_decay=0.5):
        scales |= dict.fromkeys(group["names"], group["lr_scale"])
    assert scales["head.weight"] == scales["norm.weight"] == 1.0
    assert [scales[f"blocks.{index}.attn.qkv.weight"] for index in range(3)] == [0.125, 0.25, 0.5]
    assert scales["stem.proj.weight"] == scales["position.table"] == 0.0625
    assert scales["readout.queries"] == (0.0625 if readout == "cls" else 1.0)


def test_groups_work_on_any_model_and_skip_frozen_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    model[0].weight.requires_grad_(False)
    groups = fathoms.param_groups(model, 0.1)
    assert [group["names"] for group in groups] == [["0.bias", "1.weight", "1.bias"]]
    with pytest.raises(
        FathomsError, match="layer_decay knows the layers of fathoms models only, not of Sequential"
    ):
        fathoms.param_groups(model, 0.1, layer_decay=0.9)
    for bad in ({"weight_decay": -1.0}, {"weight_decay": 0.1, "layer_decay": 0.0}):
        with pytest.raises(FathomsError, match="param_groups"):
            fathoms.param_groups(model, **bad)
