"""Arguments in a checkpoint of timm or DeiT build the model that was trained, or are refused."""

from __future__ import annotations

import argparse

import pytest
import torch

from fathoms.cli.main import main
from fathoms.errors import WeightsError
from fathoms.evaluating.load import load_run

timm = pytest.importorskip("timm")
NAME = "vit_tiny_patch16_224"


def saved(path, given, **args):
    """A checkpoint as timm's saver writes it, and its model."""
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=3, img_size=32, **given).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    args = argparse.Namespace(**{"model": NAME, "gp": None, "model_kwargs": {}, **args})
    torch.save({"arch": NAME, "state_dict": model.state_dict(), "args": args}, path)
    return model


@pytest.mark.parametrize(
    ("given", "args", "config"),
    [
        ({"num_heads": 6}, {"model_kwargs": {"num_heads": 6, "drop_path_rate": 0.2}}, {"heads": 6}),
        ({"global_pool": "avg"}, {"gp": "avg"}, {"readout": "mean_cls"}),
        ({"init_values": 0.5}, {"model_kwargs": {"init_values": 0.5}}, {"residual": "layerscale"}),
        ({"global_pool": "token"}, {"gp": "token", "model_kwargs": {"class_token": True}}, {"heads": 3}),
    ],
    ids=["heads", "average", "layerscale", "its own"],
)
def test_arguments_that_a_config_expresses_build_the_model(tmp_path, given, args, config):
    """Other heads fit by every shape: the named model gave other logits without a word."""
    file = tmp_path / "last.pth.tar"
    theirs, images = saved(file, given, **args), torch.randn(2, 3, 32, 32)
    loaded = load_run(file)
    assert {name: getattr(loaded.config, name) for name in config} == config
    with torch.no_grad():
        assert torch.allclose(loaded.model(images), theirs(images), atol=1e-4)


@pytest.mark.parametrize(
    ("given", "args", "named"),
    [
        ({"act_layer": "relu"}, {"model_kwargs": {"act_layer": "relu"}}, "act_layer=relu"),
        ({"global_pool": "max", "fc_norm": False}, {"gp": "max"}, "global_pool=max"),
        (
            {"global_pool": "avg", "fc_norm": False},
            {"gp": "avg", "model_kwargs": {"fc_norm": False}},
            "global_pool=avg",
        ),
    ],
    ids=["act", "max", "average without norm"],
)
def test_arguments_that_no_config_expresses_are_refused_by_name(tmp_path, given, args, named):
    file = tmp_path / "last.pth.tar"
    saved(file, given, **args)
    for name in (None, NAME, f"timm/{NAME}"):
        with pytest.raises(WeightsError, match=f"was trained with {named}, which cannot be taken over here"):
            load_run(file, name)


def test_other_heads_are_compared_with_what_is_asked_for(tmp_path):
    file = tmp_path / "last.pth.tar"
    saved(file, {"num_heads": 6}, model_kwargs={"num_heads": 6})
    assert load_run(file, heads=6).config.heads == 6
    with pytest.raises(WeightsError, match="--heads: .* was trained with heads 6, not 3"):
        load_run(file, heads=3)
    with pytest.raises(WeightsError, match="was trained with heads 6, not 3"):
        load_run(file, f"timm/{NAME}")


def test_the_crop_of_deit_is_the_share_of_its_crop(tmp_path):
    file = tmp_path / "last.pth.tar"
    saved(file, {}, eval_crop_ratio=0.6, input_size=32)
    assert load_run(file).preprocessing.crop_pct == 0.6


def test_convert_says_what_the_safetensors_does_not(tmp_path, capsys):
    file, target = tmp_path / "last.pth.tar", tmp_path / "last.safetensors"
    saved(file, {"num_heads": 6}, mean=[0.1, 0.2, 0.3], crop_pct=0.6, model_kwargs={"num_heads": 6})
    assert main(["convert", str(file), str(target)]) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if "says of its model" in line)
    for part in (
        f"model {NAME}",
        "mean [0.1, 0.2, 0.3]",
        "crop_pct 0.6",
        "'num_heads': 6",
        f"{target} alone does not",
    ):
        assert part in said
