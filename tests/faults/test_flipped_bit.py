"""One flipped bit in the weights of a checkpoint is found by every command that opens it."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image

from fathoms import FathomsError, load_run, load_weights
from fathoms.cli.main import main


@pytest.fixture
def run(digits_run, tmp_path):
    """A copy of a run, which a test may damage, in a folder of its own."""
    return shutil.copytree(digits_run, tmp_path / "runs" / "digits")


def flip(path):
    """Flip the lowest bit of a byte in the last tensor: the file stays readable, its numbers finite."""
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("given", ["run", "checkpoint folder", "file"])
@pytest.mark.parametrize("command", ["validate", "predict", "export"])
def test_validate_predict_and_export_refuse_weights_with_a_flipped_bit(run, tmp_path, command, given, capsys):
    best = run / "checkpoints" / "best"
    place = str({"run": run, "checkpoint folder": best, "file": best / "model.safetensors"}[given])
    Image.new("L", (8, 8), 90).save(tmp_path / "digit.png")
    words = {
        "validate": ["digits", "--checkpoint", place, "--device", "cpu"],
        "predict": [str(tmp_path / "digit.png"), "--checkpoint", place, "--device", "cpu"],
        "export": [place, "--format", "safetensors", "--output", str(tmp_path / "out.safetensors")],
    }[command]
    assert main([command, *words]) == 0
    (tmp_path / "out.safetensors").unlink(missing_ok=True)
    capsys.readouterr()
    flip(best / "model.safetensors")
    assert main([command, *words]) == 2
    message = capsys.readouterr().err
    assert "model.safetensors: damaged or replaced: it is not what was saved" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out.safetensors").exists()


def test_a_run_resumes_from_the_checkpoint_before_the_damaged_one_and_says_so(run):
    flip(run / "checkpoints" / "last" / "model.safetensors")
    words = ["--epochs", "3", "--depth", "1", "--lr", "3e-3", "--warmup-epochs", "0", "--device", "cpu"]
    with pytest.warns(UserWarning, match="last: damaged .model.safetensors is not what was saved."):
        assert main(["train", "--output", str(run.parent), "--experiment", run.name, *words]) == 0


def test_weights_that_start_a_training_or_fill_a_model_are_checked_too(run):
    weights = run / "checkpoints" / "best" / "model.safetensors"
    model = load_run(str(run)).model
    load_weights(model, weights)
    flip(weights)
    with pytest.raises(FathomsError, match="damaged or replaced"):
        load_weights(model, weights)


def test_a_file_is_checked_against_its_card_and_without_any_record_it_is_taken(run, tmp_path):
    exported = tmp_path / "model.safetensors"
    assert main(["export", str(run), "--format", "safetensors", "--output", str(exported)]) == 0
    flip(exported)
    with pytest.raises(FathomsError, match=r"differs from that in model.safetensors.json"):
        load_run(str(exported))
    card = exported.with_name("model.safetensors.json")
    card.write_text(json.dumps({**json.loads(card.read_text()), "sha256": None}))
    assert load_run(str(exported)).num_classes == 10


def test_weights_that_the_manifest_does_not_list_are_not_opened(run):
    best = run / "checkpoints" / "best"
    shutil.copy(best / "model.safetensors", best / "ema.safetensors")
    with pytest.raises(FathomsError, match=r"ema.safetensors: manifest.json does not list it"):
        load_run(str(run))
