"""fathoms' models through timm: built by name, trained by timm's own optimizer, loss and data settings."""

from __future__ import annotations

import pytest
import timm
import torch

import fathoms
import fathoms.timm_models
from fathoms.errors import FathomsError
from fathoms.models.zoo import list_models

SMALL = {"depth": 3, "img_size": 32, "patch_size": 8, "num_classes": 7}


def test_every_name_of_the_zoo_is_in_timms_registry():
    assert set(timm.list_models("fathoms_*")) == {f"fathoms_{name}" for name in list_models()}


def test_a_model_from_timm_is_the_model_of_the_zoo():
    torch.manual_seed(0)
    ours = fathoms.create_model("cait_xxs24_224", depth=3, image_size=32, patch_size=8, num_classes=7)
    theirs = timm.create_model("fathoms_cait_xxs24_224", **SMALL)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


def test_timms_words_for_sizes_are_taken_and_switches_too():
    model = timm.create_model(
        "fathoms_vit_tiny_patch16_224", in_chans=1, drop_path_rate=0.2, norm="dyt", **SMALL
    )
    config = model.config
    assert (config.image_size, config.in_channels, config.drop_path, config.norm) == (32, 1, 0.2, "dyt")


def test_timms_optimizer_trains_it_with_our_groups():
    from timm.optim import create_optimizer_v2

    model = timm.create_model("fathoms_vit_tiny_patch16_224", residual="layerscale", **SMALL)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05, layer_decay=0.5)
    ours = fathoms.param_groups(model, weight_decay=0.05, layer_decay=0.5)
    scales = {id(p): (g["weight_decay"], g["lr_scale"]) for g in ours for p in g["params"]}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert scales[id(parameter)] == (group["weight_decay"], pytest.approx(group["lr_scale"]))
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 7
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2


def test_timms_data_settings_are_read_from_it():
    from timm.data import resolve_data_config

    settings = resolve_data_config({}, model=timm.create_model("fathoms_vit_tiny_patch16_224", **SMALL))
    assert settings["input_size"] == (3, 32, 32)


def test_features_and_a_new_classifier_as_timms_users_ask_for_them():
    model = timm.create_model("fathoms_vit_tiny_patch16_224", **SMALL)
    model.reset_classifier(0)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 192)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pretrained": True}, "no pretrained weights"),
        ({"drop_rate": 0.1}, "drop_rate"),
        ({"img_size": (32, 64)}, "not square"),
        ({"nrom": "dyt"}, "norm"),
    ],
)
def test_what_cannot_be_done_is_one_line(options, words):
    with pytest.raises(FathomsError, match=words) as caught:
        timm.create_model("fathoms_vit_tiny_patch16_224", **options)
    assert "\n" not in str(caught.value)


def test_what_timm_calls_to_read_features_is_there():
    model = timm.create_model("fathoms_vit_tiny_patch16_224", **SMALL).eval()
    images = torch.randn(2, 3, 32, 32)
    maps = model.get_intermediate_layers(images, n=2, reshape=True)
    assert [tuple(each.shape) for each in maps] == [(2, 192, 4, 4)] * 2
    _, all_of_it = model.forward_intermediates(images, [0, 1])
    early = model.forward_intermediates(images, [0, 1], intermediates_only=True, stop_early=True)
    assert all(torch.equal(a, b) for a, b in zip(all_of_it, early, strict=True))
    calls = []
    model.blocks[2].register_forward_hook(lambda *_: calls.append(1))
    model.forward_intermediates(images, [0, 1], intermediates_only=True, stop_early=True)
    assert not calls
    model.set_input_size((64, 64))
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 7)
    with pytest.raises(FathomsError, match="img_size=64x32 is not square"):
        model.set_input_size((64, 32))
    with pytest.raises(FathomsError, match="features_only is not supported; call forward_intermediates"):
        timm.create_model("fathoms_vit_tiny_patch16_224", features_only=True)


def test_a_classifier_is_replaced_and_the_pooling_stays():
    model = timm.create_model("fathoms_vit_tiny_patch16_224", **SMALL)
    model.reset_classifier(3, "token")
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    with pytest.raises(FathomsError, match="global_pool='avg' is not the read-out 'cls' of this model"):
        model.reset_classifier(5, "avg")
    assert model.default_cfg["architecture"] == "fathoms_vit_tiny_patch16_224"
