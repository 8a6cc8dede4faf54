"""`fathoms export` of a run: where the file goes, its card, and options that would not be used."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image

from fathoms.cli.main import main
from fathoms.evaluating.load import load_run
from fathoms.evaluating.preprocessing import Preprocessing


def test_a_card_tells_the_run_s_config_recipe_metrics_and_classes(digits_run, tmp_path, capsys):
    words = ["--format", "safetensors", "--output", str(tmp_path / "m.safetensors"), "--fold"]
    assert main(["export", str(digits_run), *words, "--norm", "layernorm"]) == 2
    assert "use onnx or torch-export, or leave --fold out" in capsys.readouterr().err
    assert main(["export", str(digits_run), *words[:-1]]) == 0
    card = json.loads((tmp_path / "m.safetensors.json").read_text())
    assert card["config"]["depth"] == 1
    assert card["recipe"]["epochs"] == 3
    assert card["metrics"]["last"]["top1"] > 20
    assert card["classes"] == [str(digit) for digit in range(10)]
    text = (tmp_path / "m.safetensors.md").read_text()
    assert "| epochs | 3 |" in text
    assert "| status | done |" in text
    assert f"| best.top1 | {card['metrics']['best']['top1']:.6g} |" in text
    again, loaded = load_run(str(tmp_path / "m.safetensors")), load_run(str(digits_run))
    assert (again.classes, again.preprocessing, again.metrics) == (
        loaded.classes,
        loaded.preprocessing,
        loaded.metrics,
    )


def test_an_export_goes_into_the_run_and_the_run_stays_what_it_was(digits_run, tmp_path, capsys):
    run = shutil.copytree(digits_run, tmp_path / "run")
    assert main(["export", str(run), "--format", "safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(run / "model.safetensors")
    assert load_run(str(run)).source == str(run / "checkpoints" / "best" / "model.safetensors")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-drop", "2"], "--max-drop needs --int8 or --fastest; give both or neither"),
        (["--calibrate", "digits"], "--calibrate needs --int8 or --fastest; give both or neither"),
        (["--fastest", "digits", "--fold"], "--fold would not be used: --fastest tries with and without"),
        (["--fastest", "digits", "--format", "timm"], "--format timm would not be used"),
        (["--fastest", "nosuch"], "--fastest nosuch: no such file or folder"),
        (["--int8", "digits", "--max-drop", "nan"], "--max-drop nan: use 0 to 100 percentage points"),
        (["--int8", "digits", "--max-drop", "-1"], "--max-drop -1.0: use 0 to 100 percentage points"),
        (["--visibility", "public"], "--visibility needs --push; give both or neither"),
        (["--int8", "digits", "--format", "timm"], "--int8 is for --format onnx and openvino, not for timm"),
        (["--int8"], "--int8"),
    ],
)
def test_options_that_would_not_be_used_are_refused(digits_run, tmp_path, words, message, capsys):
    output = [] if "timm" not in words else ["--output", str(tmp_path / "m.safetensors")]
    assert main(["export", str(digits_run), *words, *output]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_overwritten_without_a_word(digits_run, tmp_path, capsys):
    """The float file, its card, and the int8 file beside it under a name of its own."""
    run = shutil.copytree(digits_run, tmp_path / "run")
    words = ["export", str(run), "--format", "safetensors"]
    assert main(words) == 0
    (run / "model.safetensors").write_bytes(b"mine")
    capsys.readouterr()
    assert main(words) == 2
    assert "give another name, or --overwrite to replace it" in capsys.readouterr().err
    assert (run / "model.safetensors").read_bytes() == b"mine"
    (run / "model.safetensors").unlink()
    assert main(words) == 2
    assert "model.safetensors.json: is there already" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0


@pytest.mark.compile
def test_int8_has_a_name_of_its_own_beside_the_float_file(digits_run, tmp_path):
    run = shutil.copytree(digits_run, tmp_path / "run")
    assert main(["export", str(run)]) == 0
    before = (run / "model.onnx").read_bytes()
    assert main(["export", str(run), "--int8", "digits", "--max-drop", "100"]) == 0
    assert (run / "model.onnx").read_bytes() == before
    assert (run / "model.int8.onnx").stat().st_size < len(before)
    assert json.loads((run / "model.int8.onnx.json").read_text())["int8"]["images"] > 0


def test_converted_weights_do_not_replace_a_file(tmp_path, capsys):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    (tmp_path / "a.safetensors").write_bytes(b"mine")
    assert main(["convert", str(tmp_path / "a.pth"), str(tmp_path / "a.safetensors")]) == 2
    assert "a.safetensors: is there already" in capsys.readouterr().err
    assert (tmp_path / "a.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["validate", "--checkpoint", "RUN", "--results-file", "DIR/kept.csv"], "kept.csv"),
        (["validate", "--checkpoint", "RUN", "--confusion", "DIR/kept.csv"], "kept.csv"),
        (
            ["predict", "DIR/digit.png", "--checkpoint", "RUN", "--attention", "DIR/maps"],
            "maps/000000-digit.png",
        ),
    ],
)
def test_results_and_maps_do_not_replace_a_file(digits_run, tmp_path, words, file, capsys):
    (tmp_path / "maps").mkdir()
    (tmp_path / file).write_bytes(b"mine")
    Image.new("L", (8, 8), 90).save(tmp_path / "digit.png")
    spoken = [word.replace("RUN", str(digits_run)).replace("DIR", str(tmp_path)) for word in words]
    assert main([*spoken, "--device", "cpu"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / file).read_bytes() == b"mine"
    assert main([*spoken, "--device", "cpu", "--overwrite"]) == 0
    assert (tmp_path / file).read_bytes() != b"mine"


def test_a_timm_checkpoint_becomes_a_folded_onnx_file_in_one_command(tmp_path, capsys):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    trained = timm.create_model("test_vit", num_classes=3).eval()
    checkpoint = tmp_path / "model_best.pth.tar"
    # As timm's train.py writes them: the weights among what training needs to go on.
    torch.save({"epoch": 7, "arch": "test_vit", "state_dict": trained.state_dict()}, checkpoint)
    words = ["export", str(checkpoint), "--model", "timm/test_vit"]
    output = tmp_path / "model.onnx"
    assert main([*words, "--accelerate", "--fold", "--output", str(output), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["folded"] > 0
    assert result["accelerated"] == 0
    assert max(result["differences"].values()) < 1e-5
    images = torch.randn(2, 3, 160, 160)
    loaded = load_run(output)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), trained(images), atol=1e-4, rtol=1e-4)
    # timm evaluates this model with its own numbers, which are not the defaults of a recipe.
    card = json.loads((tmp_path / "model.onnx.json").read_text())
    assert card["weights"] == str(checkpoint)
    assert card["preprocessing"]["mean"] == list(trained.pretrained_cfg["mean"]) != [0.485, 0.456, 0.406]
    assert card["preprocessing"]["crop_pct"] == trained.pretrained_cfg["crop_pct"] != 0.9


def test_the_flags_of_the_images_are_in_the_card(digits_run, tmp_path):
    flags = ["--mean", "0.1", "0.2", "0.3", "--std", "0.4", "0.5", "0.6", "--crop-pct", "0.7"]
    words = [
        *flags,
        "--interpolation",
        "bilinear",
        "--format",
        "safetensors",
        "--output",
        str(tmp_path / "m.safetensors"),
    ]
    assert main(["export", str(digits_run), *words]) == 0
    kept = load_run(tmp_path / "m.safetensors").preprocessing
    assert kept == Preprocessing(0.7, "bilinear", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
