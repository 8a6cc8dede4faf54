"""Exported models: verified before they get their name, loadable, with a card next to them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from fathoms import FathomsError, ViT, ViTConfig, create_model, load_weights, save_weights
from fathoms.cli import convert as convert_command
from fathoms.cli import export as export_command
from fathoms.cli.flags.parse import parse
from fathoms.evaluating.onnx_model import OnnxModel
from fathoms.exporting.verified_export import export_model
from tiny_models import perturbed_vit, random_images

SMALL = {"image_size": 16, "patch_size": 8, "dim": 24, "heads": 3, "depth": 1, "num_classes": 5}
CAIT = {"attention": "talking_heads", "residual": "layerscale", "readout": "class_attention"}
SCALER = {"norm": "learnable_scaler", "residual": "layerscale"}
# Between them, every part that came with the rules of 2025 and 2026.
CONV = {"stem": "conv", "patch_size": 2, "readout": "seqpool", "attn_gate": "head", "residual": "mv_split"}
LATE = {"depth": 3, "class_token_block": 1, "placement_by_depth": "1-2:keel", "residual": "orthogonal"}
LATE |= {"position": "learned_rope", "attn_gate": "channel", "attention": "talking_heads"}
DEEP = {"depth": 2, "residual": "completep", "base_depth": 1, "base_dim": 8}


def vit(**more):
    return perturbed_vit(**SMALL | more)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("switches", "folded"),
    [
        (CAIT, True),
        (SCALER, False),
        (CONV, True),
        (LATE, False),
        (DEEP, True),
        ({"residual": "prores"}, False),
        ({"residual": "layernorm_scaling", "depth": 2, "drop_path": 0.1}, False),
    ],
    ids=["cait", "scaler", "conv", "late", "completep", "prores", "layernorm_scaling"],
)
def test_onnx_answers_at_any_batch_as_the_model_does(tmp_path, switches, folded):
    model = vit(**switches)
    report = export_model(model, tmp_path / "m.onnx", folded=folded)
    assert set(report.differences) == {1, 5}
    assert max(report.differences.values()) < 1e-5
    logits = OnnxModel(tmp_path / "m.onnx")(random_images(7))
    assert torch.allclose(logits, model(random_images(7)), atol=1e-4)
    card = json.loads((tmp_path / "m.onnx.json").read_text())
    assert card["opset"] == 18
    assert card["folded"] == report.folded
    assert "at batch 5" in (tmp_path / "m.onnx.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.json", "m.onnx.md"]


@pytest.mark.compile
def test_a_folded_scaler_network_has_no_norm_in_its_onnx_graph(tmp_path):
    import onnx

    export_model(vit(**SCALER), tmp_path / "m.onnx", folded=True)
    operators = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert not any("Norm" in name for name in operators)
    assert "ReduceMean" not in operators


@pytest.mark.compile
def test_a_program_runs_at_other_batches(tmp_path):
    report = export_model(vit(**CAIT), tmp_path / "m.pt2", "torch-export", folded=True)
    assert max(report.differences.values()) < 1e-5
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert torch.allclose(program(random_images(3)), vit(**CAIT)(random_images(3)), atol=1e-4)


@pytest.mark.parametrize("format", ["safetensors", "timm"])
def test_weights_load_back_exactly_and_a_model_in_training_stays_in_it(tmp_path, format):
    model = vit(**CAIT).train()
    report = export_model(model, tmp_path / "m.safetensors", format)
    assert set(report.differences.values()) == {0.0}
    assert all(module.training for module in model.modules())
    model.eval()
    twin = ViT(model.config).eval()
    assert not torch.equal(twin(random_images(2)), model(random_images(2)))
    assert load_weights(twin, tmp_path / "m.safetensors").layout == (
        "fathoms" if format == "safetensors" else "timm"
    )
    assert torch.equal(twin(random_images(2)), model(random_images(2)))


def test_a_folded_scaler_network_is_saved_with_the_config_that_rebuilds_it(tmp_path):
    export_model(vit(**SCALER), tmp_path / "m.safetensors", "safetensors", folded=True)
    card = json.loads((tmp_path / "m.safetensors.json").read_text())
    twin = ViT(ViTConfig(**card["config"])).eval()
    load_weights(twin, tmp_path / "m.safetensors")
    assert torch.allclose(twin(random_images(2)), vit(**SCALER)(random_images(2)), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "m.onx"}, "an ONNX file ends in .onnx; change the name"),
        ({"format": "onxx"}, "no format is called 'onxx'; did you mean 'onnx'"),
        ({"path": "no/m.onnx"}, "the folder does not exist"),
        ({"opset": 9}, "--opset 9 is not supported; use 18 to 23"),
        (
            {"path": "m.pt2", "format": "torch-export", "opset": 18},
            "--opset is for --format onnx and openvino, not for torch-export; leave it out",
        ),
        (
            {"path": "m.safetensors", "format": "safetensors", "folded": True},
            "no ViTConfig describes this model",
        ),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(tmp_path, options, message):
    path = tmp_path / options.pop("path", "m.onnx")
    with pytest.raises(FathomsError, match=message):
        export_model(vit(), path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_export_gets_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fathoms.exporting.verified_export._write_weights",
        lambda *_: lambda images: [torch.ones(len(images), 5)],
    )
    with pytest.raises(FathomsError, match="the safetensors file differs by"):
        export_model(vit(), tmp_path / "m.safetensors", "safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_commands_run(tmp_path, capsys):
    from fathoms import create_model

    model = create_model("vit_digits", num_classes=10, depth=1)
    save_weights(model, tmp_path / "w.safetensors")
    words = [str(tmp_path / "w.safetensors"), "--model", "vit_digits", "--depth", "1"]
    more = ["--format", "safetensors", "--output", str(tmp_path / "out.safetensors"), "--json"]
    assert export_command.run(parse(export_command, "export", [*words, *more])) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == {"1": 0.0, "5": 0.0}
    with pytest.raises(FathomsError, match="this would overwrite the checkpoint"):
        export_command.run(parse(export_command, "export", [*words, "--format", "timm"]))
    torch.save({"model": {"a": torch.ones(3)}, "epoch": 1}, tmp_path / "a.pth")
    words = [str(tmp_path / "a.pth"), str(tmp_path / "a.safetensors")]
    assert convert_command.run(parse(convert_command, "convert", words)) == 0
    assert "1 tensors under 'model', 3 numbers, float32" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["export", "convert", "predict"])
def test_a_command_module_imports_no_torch(command):
    code = f"import sys, fathoms.cli.{command}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_model_that_timm_has_not_is_pointed_to_the_other_format(tmp_path):
    with pytest.raises(FathomsError) as raised:
        export_model(vit(residual="rezero"), tmp_path / "m.safetensors", "timm")
    assert (
        str(raised.value)
        == "export: residual='rezero' has no place in timm's layout; use --format safetensors"
    )
    assert not list(tmp_path.iterdir())


def test_an_accelerated_and_folded_cait_of_timm_is_compared_with_the_model_as_it_was(tmp_path):
    cait = pytest.importorskip("timm.models.cait")
    torch.manual_seed(0)
    model = cait.Cait(
        img_size=32, patch_size=8, embed_dim=32, depth=2, depth_token_only=1, num_heads=2, num_classes=3
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    exported = export_model(model.eval(), tmp_path / "m.onnx", accelerated=True, folded=True)
    assert exported.accelerated == 3, "two talking heads and one class attention"
    assert exported.folded > 6
    assert max(exported.differences.values()) < 1e-5
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "3 modules are replaced by faster ones." in (tmp_path / "m.onnx.md").read_text()


@pytest.mark.parametrize("kind", ["float16", "float64", "meta"])
def test_weights_that_no_file_can_hold_are_refused(kind, tmp_path):
    model = create_model("vit_digits", depth=1)
    model = model.to("meta") if kind == "meta" else model.to(getattr(torch, kind))
    with pytest.raises(FathomsError, match=r"export: stem\.proj\.weight holds"):
        export_model(model, tmp_path / "m.onnx")


@pytest.mark.parametrize("format", ["safetensors", "timm"])
def test_swapped_norms_of_a_timm_model_are_named_where_its_name_cannot_say_them(tmp_path, format):
    """The words were about --fold, which was not given."""
    pytest.importorskip("timm")
    from fathoms.models.build_timm import build_timm
    from fathoms.surgery.swap import swap_norms

    model = build_timm("timm/test_vit", 5).eval()
    swap_norms(model, "rmsnorm", how="reset")
    with pytest.raises(
        FathomsError, match="RMSNorm in the place of LayerNorm, as --swap-norms makes it"
    ) as said:
        export_model(model, tmp_path / "m.safetensors", format, name="timm/test_vit")
    assert "--fold" not in str(said.value)
