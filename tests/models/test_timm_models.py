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


@pytest.mark.parametrize("options", [{}, {"residual": "layerscale", "readout": "mean"}])
def test_a_model_saved_for_timms_hub_is_built_from_there_with_its_weights(tmp_path, options):
    from timm.models._hub import save_for_hf

    model = timm.create_model(
        "fathoms_vit_tiny_patch16_224", **SMALL, **options, pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3)}
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_for_hf(model, str(tmp_path), model_args={**SMALL, **options})
    images = torch.randn(2, 3, 32, 32)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images), model(images))
    assert tuple(again.pretrained_cfg["mean"]) == (0.1, 0.2, 0.3)
    # As timm fine-tunes: another classifier on the same features.
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=4).eval()
    assert torch.equal(other.forward_features(images), model.forward_features(images))
    assert (other.pretrained_cfg["num_classes"], other(images).shape) == (4, (2, 4))
    assert not torch.equal(timm.create_model(f"local-dir:{tmp_path}").eval()(images), model(images))


def test_pretrained_path_reads_weights_of_timm_itself(tmp_path):
    from safetensors.torch import save_file

    sizes = {"img_size": 32, "depth": 2, "num_classes": 7}
    theirs = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    model = timm.create_model(
        "fathoms_vit_tiny_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "w.safetensors"), "num_classes": 7},
        **sizes,
    ).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(model(images), theirs(images), atol=1e-5)


def test_a_configuration_sets_classes_and_images_as_in_timm():
    cfg = {"num_classes": 3, "input_size": (1, 32, 32)}
    model = timm.create_model("fathoms_vit_tiny_patch16_224", depth=1, pretrained_cfg=cfg)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 3)
    own = {"image_size": 48, "in_channels": 2, "num_classes": 4}
    model = timm.create_model("fathoms_vit_tiny_patch16_224", depth=1, pretrained_cfg_overlay=cfg, **own)
    assert model(torch.randn(2, 2, 48, 48)).shape == (2, 4)


def test_the_names_that_timms_own_tests_ask_for_are_there():
    model = timm.create_model("fathoms_cct_2_3x2_32", num_classes=5)
    assert (model.global_pool, model.embed_dim, model.head_hidden_size) == ("seqpool", 128, 128)
    assert model.feature_info[1] == {"module": "blocks.1", "num_chs": 128, "reduction": 4}
    cfg = model.pretrained_cfg
    assert (cfg["fixed_input_size"], cfg["num_classes"]) == (True, 5)
    assert {f"{cfg['first_conv']}.weight", f"{cfg['classifier']}.weight"} <= model.state_dict().keys()
    assert timm.get_pretrained_cfg("fathoms_vit_scaler_192x36_16").mean == (0.5, 0.5, 0.5)
    with pytest.raises(FathomsError, match="global_pool='avg' is not its read-out 'cls'; set readout="):
        timm.create_model("fathoms_vit_tiny_patch16_224", global_pool="avg")


@pytest.mark.plain
def test_timm_extracts_features_from_a_graph_of_blocks():
    from timm.models._features_fx import FeatureGraphNet

    model = timm.create_model("fathoms_vit_tiny_patch16_224", **SMALL).eval()
    images = torch.randn(2, 3, 32, 32)
    (tokens,) = FeatureGraphNet(model, out_indices=(1,), out_map=None)(images)
    _, sequences = model.forward_intermediates(images, output_fmt="NLC", return_prefix_tokens=True)
    assert torch.equal(tokens[:, 1:], sequences[1][0])


def test_a_classifier_is_replaced_and_the_pooling_stays():
    model = timm.create_model("fathoms_vit_tiny_patch16_224", **SMALL)
    model.reset_classifier(3, "token")
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    with pytest.raises(FathomsError, match="global_pool='avg' is not the read-out 'cls' of this model"):
        model.reset_classifier(5, "avg")
    assert model.default_cfg["architecture"] == "fathoms_vit_tiny_patch16_224"


def test_device_and_dtype_are_obeyed_and_an_unknown_argument_is_a_type_error():
    model = timm.create_model("fathoms_vit_digits", device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float64)}
    assert model.in_chans == model.config.in_channels
    with pytest.raises(TypeError, match="not_a_model_arg"):
        timm.create_model("fathoms_vit_digits", not_a_model_arg=1)


def test_a_new_head_is_in_the_mode_of_its_model():
    model = timm.create_model("fathoms_deit_tiny_distilled_patch16_224", device="meta").eval()
    model.reset_classifier(2)
    assert not any(module.training for module in model.modules())
