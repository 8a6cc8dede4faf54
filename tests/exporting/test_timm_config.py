"""`--format timm`: timm loads the folder with its config.json, without fathoms, to the same logits."""

from __future__ import annotations

import json

import pytest
import torch

from fathoms.cli.main import main
from fathoms.exporting.verified_export import export_model
from tiny_models import perturbed_vit

timm = pytest.importorskip("timm")

SMALL = {"image_size": 32, "patch_size": 8, "dim": 24, "heads": 3, "depth": 2, "num_classes": 5}
FAMILIES = {
    "plain": {},
    "layerscale": {"residual": "layerscale"},
    "qk norm, no bias": {"qk_norm": "layernorm", "qkv_bias": False, "mlp_ratio": 2.0},
    "registers": {"registers": 2, "class_position": False},
    "registers, a class token with a position": {"registers": 2},
    "mean": {"readout": "mean"},
    "mean beside a token": {"readout": "mean_cls"},
    "distilled": {"distill_token": True},
    "cait": {"attention": "talking_heads", "residual": "layerscale", "readout": "class_attention"},
    "grey": {"in_channels": 1},
    "rmsnorm": {"norm": "rmsnorm"},
    "learnable scaler": {"norm": "learnable_scaler"},
}
NOT_TIMMS = ("registers, a class token with a position", "learnable scaler")


@pytest.mark.parametrize("family", FAMILIES)
def test_timm_loads_the_folder_to_the_same_logits_or_a_line_says_why_not(family, tmp_path):
    model = perturbed_vit(**SMALL | FAMILIES[family])
    exported = export_model(model, tmp_path / "model.safetensors", "timm", name="own")
    assert bool(exported.notes) == (family in NOT_TIMMS), exported.notes
    if exported.notes:
        assert exported.notes[0].startswith("config.json: not written, since timm builds another model (")
        assert not (tmp_path / "config.json").exists()
        return
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(3, model.config.in_channels, 32, 32)
    with torch.no_grad():
        assert torch.allclose(theirs(images), model(images), atol=1e-5)


def test_the_config_has_the_classes_and_the_preprocessing_of_the_card(tmp_path):
    steps = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.8, "interpolation": "bilinear"}
    perturbed_vit(**SMALL).save_pretrained(tmp_path / "m", preprocessing=steps, classes=list("abcde"))
    (tmp_path / "out").mkdir()
    words = [
        "export",
        str(tmp_path / "m"),
        "--format",
        "timm",
        "--output",
        str(tmp_path / "out/model.safetensors"),
    ]
    assert main(words) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["label_names"], config["num_classes"]) == (list("abcde"), 5)
    assert config["pretrained_cfg"].items() >= {**steps, "input_size": [3, 32, 32]}.items()
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    data = timm.data.resolve_model_data_config(theirs)
    assert (list(data["mean"]), data["crop_pct"], data["input_size"]) == ([0.1, 0.2, 0.3], 0.8, (3, 32, 32))
    (tmp_path / "out" / "model.safetensors").unlink()
    for card in (tmp_path / "out").glob("model*"):
        card.unlink()
    assert main(words) == 2, "config.json is there already"


def test_a_model_of_timm_s_own_keeps_its_name(tmp_path):
    from fathoms.models.build_timm import build_timm

    model = build_timm("timm/test_vit", 5).eval()
    exported = export_model(model, tmp_path / "model.safetensors", "timm", name="timm/test_vit")
    assert exported.notes == ()
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == "test_vit"
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(1, 3, 160, 160)
    with torch.no_grad():
        assert torch.allclose(theirs(images), model(images), atol=1e-5)
