"""`fathoms export` of a run: where the file goes, its card, and options that would not be used."""

from __future__ import annotations

import json
import shutil

import pytest

from fathoms.cli.main import main
from fathoms.evaluate.load import load_run


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
        (["--max-drop", "2"], "--max-drop needs --int8; give both or neither"),
        (["--visibility", "public"], "--visibility needs --push; give both or neither"),
        (["--int8", "digits", "--format", "timm"], "--int8 is for --format onnx only, not for timm"),
        (["--int8"], "--int8"),
    ],
)
def test_options_that_would_not_be_used_are_refused(digits_run, tmp_path, words, message, capsys):
    output = [] if "timm" not in words else ["--output", str(tmp_path / "m.safetensors")]
    assert main(["export", str(digits_run), *words, *output]) == 2
    assert message in capsys.readouterr().err
