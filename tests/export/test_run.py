"""From a run folder to a file that others run, and to answers, with what the run knows."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image

from fathoms import FathomsError, ViT
from fathoms.cli.main import main
from fathoms.data.sources.digits import digit_sources
from fathoms.evaluate.load import load_trained
from fathoms.evaluate.preprocessing import Look
from fathoms.export.export import export_model
from fathoms.export.quantise import Judge
from fathoms.train.recipe.recipe import Recipe


@pytest.fixture
def digit(tmp_path):
    """A held-out digit as a picture file."""
    Image.fromarray(digit_sources()[1].images[0]).save(tmp_path / "digit.png")
    return tmp_path / "digit.png"


@pytest.mark.parametrize("place", [".", "checkpoints/last", "checkpoints/best/model.safetensors"])
def test_a_run_a_checkpoint_and_a_weights_file_answer_alike(digits_run, digit, place, capsys):
    """The class and its probability are those of the model on the loader's pixels: same preprocessing."""
    assert (
        main(["predict", str(digit), "--checkpoint", str(digits_run / place), "--device", "cpu", "--json"])
        == 0
    )
    (told,) = json.loads(capsys.readouterr().out)["predictions"]
    trained = load_trained(str(digits_run / place))
    look, pixels = trained.look, torch.from_numpy(digit_sources()[1].images[:1, None, :, :, 0])
    chances = trained.model((pixels / 255 - look.mean[0]) / look.std[0]).softmax(-1)[0]
    assert told["classes"][0] == trained.classes[int(chances.argmax())]
    assert told["probabilities"][0] == pytest.approx(chances.max().item(), abs=1e-5)


def test_the_look_of_no_recipe_is_that_of_a_recipe_without_changes():
    assert Look() == Look.of(Recipe().to_dict())


@pytest.mark.plain
@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"std": [0.2, 0.0, 0.2]}, "crop_pct and std must be above zero"),
        ({"crop_pct": -1.0}, "crop_pct and std must be above zero"),
        ({"mean": [0.5]}, r"preprocessing.mean=\(0.5,\) is not a list of 3 values"),
        ({"crop_pct": "all"}, "preprocessing.crop_pct='all' is not a number"),
        ({"interpolation": "bicubc"}, "did you mean 'bicubic'"),
    ],
    ids=str,
)
def test_preprocessing_that_cannot_be_is_refused(recipe, message):
    with pytest.raises(FathomsError, match=message):
        Look.of(recipe)


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
    again, trained = load_trained(str(tmp_path / "m.safetensors")), load_trained(str(digits_run))
    assert (again.classes, again.look, again.metrics) == (trained.classes, trained.look, trained.metrics)


def test_an_export_goes_into_the_run_and_the_run_stays_what_it_was(digits_run, tmp_path, capsys):
    run = shutil.copytree(digits_run, tmp_path / "run")
    assert main(["export", str(run), "--format", "safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(run / "model.safetensors")
    assert load_trained(str(run)).source == str(run / "checkpoints" / "best" / "model.safetensors")


@pytest.mark.compile
def test_int8_shows_what_it_saves_and_costs(digits_run, tmp_path, capsys):
    words = ["export", str(digits_run), "--int8", "digits", "--output", str(tmp_path / "m.onnx")]
    assert main([*words, "--max-drop", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (before, after), (large, small) = told["int8"]["top1"], told["int8"]["bytes"]
    assert before == pytest.approx(load_trained(str(digits_run)).metrics["best"]["top1"])
    assert before - after <= 2
    assert small < 0.6 * large
    assert (tmp_path / "m.onnx").stat().st_size == small
    assert max(told["differences"].values()) < 1e-4
    assert "The matrices are int8" in (tmp_path / "m.onnx.md").read_text()
    assert main(words) == 0
    assert f"int8: top1 {before:.2f} -> {after:.2f} on" in capsys.readouterr().out


@pytest.mark.compile
def test_int8_that_costs_too_much_is_not_written(digits_run, tmp_path):
    """No file loses less than minus one hundred points."""
    model = load_trained(str(digits_run)).model
    source = digit_sources()[1]
    from fathoms.evaluate.loader import eval_loader

    loader = eval_loader(source, 8, 64, **Look().to_dict())
    judge = Judge("digits", lambda: loader.epoch(0), 10, max_drop=-101.0)
    with pytest.raises(FathomsError, match="int8 takes top1 on digits from .* nothing was written"):
        export_model(model, tmp_path / "m.onnx", int8=judge)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-drop", "2"], "--max-drop belongs to --int8; give both or neither"),
        (["--visibility", "public"], "--visibility belongs to --push; give both or neither"),
        (["--int8", "digits", "--format", "timm"], "int8 is for onnx only, not for timm"),
        (["--int8"], "--int8"),
    ],
)
def test_options_that_would_not_be_used_are_refused(digits_run, tmp_path, words, message, capsys):
    output = [] if "timm" not in words else ["--output", str(tmp_path / "m.safetensors")]
    assert main(["export", str(digits_run), *words, *output]) == 2
    assert message in capsys.readouterr().err


def test_a_run_with_swapped_norms_is_rebuilt_with_them(tmp_path):
    words = ["--epochs", "1", "--depth", "1", "--stem-norm", "pre", "--device", "cpu"]
    swap = ["--swap-norms", "learnable_scaler"]
    assert main(["train", "--output", str(tmp_path), "--experiment", "r", *words, *swap]) == 0
    trained = load_trained(str(tmp_path / "r"))
    assert isinstance(trained.model, ViT)
    assert any(name.endswith("ln0.a") for name, _ in trained.model.named_parameters())


def test_a_run_of_timms_model_is_named(tmp_path):
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    (tmp_path / "checkpoints" / "last" / "model.safetensors").touch()
    (tmp_path / "config.toml").write_text('classes = ["a"]\n[model]\nname = "timm/vit_tiny_patch16_224"\n')
    with pytest.raises(FathomsError, match="a run of timm/vit_tiny_patch16_224, which is not fathoms' own"):
        load_trained(str(tmp_path))


@pytest.mark.parametrize("text", ["[", "7"])
def test_a_card_that_is_none_is_said(digits_run, tmp_path, text):
    shutil.copy(digits_run / "checkpoints" / "best" / "model.safetensors", tmp_path)
    (tmp_path / "model.safetensors.json").write_text(text)
    with pytest.raises(FathomsError, match="model.safetensors.json: (not readable as JSON|a JSON object)"):
        load_trained(str(tmp_path / "model.safetensors"))
