"""Parameter groups: weight decay and layer decay."""

from __future__ import annotations

from collections import Counter

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
    assert "exempt from decay" in table
    assert len(table.splitlines()) == 1 + len(listed)
    torch.optim.AdamW(groups, lr=1e-3)


@pytest.mark.parametrize("readout", ["cls", "class_attention"])
def test_layer_decay_falls_from_the_head_to_the_stem(readout):
    model = ViT(ViTConfig(image_size=32, dim=16, heads=2, depth=3, readout=readout, num_classes=5))
    scales = {}
    for group in fathoms.param_groups(model, 0.1, layer_decay=0.5):
        scales |= dict.fromkeys(group["names"], group["lr_scale"])
    assert (scales["head.weight"], scales["norm.weight"]) == (1.0, 0.5)
    assert [scales[f"blocks.{index}.attn.qkv.weight"] for index in range(3)] == [0.125, 0.25, 0.5]
    assert scales["stem.proj.weight"] == scales["position.table"] == 0.0625
    assert scales["readout.queries"] == 0.0625


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


def test_tokens_and_positions_of_other_libraries_take_no_decay():
    timm = pytest.importorskip("timm")
    torchvision = pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    small = {"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 32, "num_heads": 2}
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32
    )
    models = [
        timm.create_model("vit_tiny_patch16_224", **small),
        torchvision.models.VisionTransformer(32, 16, 1, 2, 32, 32),
        transformers.ViTForImageClassification(config),
    ]
    for model in models:
        groups = fathoms.param_groups(model, 0.05)
        plain = {name for group in groups if not group["weight_decay"] for name in group["names"]}
        named = [name for name, p in model.named_parameters() if p.ndim == 3]
        assert len(named) == 2
        assert plain >= set(named)
        assert {group["lr_scale"] for group in groups} == {1.0}
        with pytest.raises(FathomsError, match="layer_decay knows the layers of fathoms models only"):
            fathoms.param_groups(model, 0.05, layer_decay=0.7)
    # What timm's own groups leave undecayed is left undecayed.
    own = {
        name for name, p in models[0].named_parameters() if p.ndim <= 1 or name in models[0].no_weight_decay()
    }
    assert own == {
        name for g in fathoms.param_groups(models[0], 0.05) if not g["weight_decay"] for name in g["names"]
    }


@pytest.mark.parametrize(
    ("switches", "layer_decay", "scale"),
    [({}, 0.5, "lr_scale"), ({"residual": "completep"}, None, "eps_scale")],
)
def test_a_plain_optimizer_obeys_scales_or_refuses_groups_without_a_rate(switches, layer_decay, scale):
    model = fathoms.create_model("vit_digits", **switches)
    groups = fathoms.param_groups(model, 0.05, layer_decay)
    with pytest.raises(FathomsError, match=r"_scale .* which torch's optimizers do not read"):
        torch.optim.AdamW(groups, lr=1e-3)
    optimizer = torch.optim.AdamW(fathoms.param_groups(model, 0.05, layer_decay, lr=1e-3))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    assert any(group[scale] != 1 for group in groups)
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        assert group["lr"] == pytest.approx(5e-4 * given["lr_scale"])
        assert group["eps"] == pytest.approx(1e-8 * given["eps_scale"])
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("vit_tiny_patch16_224", {}, {}),
        ("vit_tiny_patch16_224", {"global_pool": "avg"}, {"readout": "mean_cls"}),
        ("deit_tiny_distilled_patch16_224", {}, {}),
        ("deit3_small_patch16_224", {}, {}),
        ("cait_xxs24_224", {}, {}),
    ],
    ids=["vit", "pooled", "deit", "deit3", "cait"],
)
def test_layer_decay_is_timms(name, theirs, ours):
    """The final norm, CaiT's class token and its class attention had other rates than there."""
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_layer_decay

    model = timm.create_model(name, depth=4, num_classes=5, **theirs)

    def numbers(groups):
        """The number of parameters by decay and rate, as a name is another there."""
        counted = Counter()
        for group in groups:
            count = sum(parameter.numel() for parameter in group["params"])
            counted[group["weight_decay"], round(group["lr_scale"], 9)] += count
        return counted

    mine = fathoms.create_model(name, depth=4, num_classes=5, **ours)
    theirs = param_groups_layer_decay(
        model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5
    )
    assert numbers(fathoms.param_groups(mine, 0.05, 0.5)) == numbers(theirs)


@pytest.mark.parametrize(
    "name", ["levit_128s", "crossvit_tiny_240", "swinv2_tiny_window8_256", "xcit_nano_12_p16_224"]
)
def test_models_of_timm_say_what_takes_no_decay(name):
    """Their own lists, with patterns, were not read: attention biases and scales were decayed."""
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_weight_decay

    with torch.device("meta"):
        model = timm.create_model(name)
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    want = {paths[id(p)] for group in groups for p in group["params"] if not group["weight_decay"]}
    ours = fathoms.param_groups(model, 0.05)
    assert {n for group in ours for n in group["names"] if not group["weight_decay"]} == want


@pytest.mark.parametrize("wrap", [torch.nn.Sequential, torch.nn.DataParallel])
def test_a_wrapped_model_keeps_its_rules(wrap):
    own = {"depth": 4, "dim": 64, "residual": "completep", "base_dim": 32, "base_depth": 2}
    model = fathoms.create_model("vit_digits", **own)

    def rules(groups):
        return [(g["lr_scale"], g["eps_scale"], g["weight_decay"], len(g["params"])) for g in groups]

    plain = rules(fathoms.param_groups(model, 0.1))
    assert len({rule[:2] for rule in plain}) > 2
    assert rules(fathoms.param_groups(wrap(model), 0.1)) == plain
