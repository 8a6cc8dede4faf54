"""One loader for runs, checkpoints, weights files and cards, of fathoms and of timm models."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fathoms import FathomsError, ViT, create_model
from fathoms.cli.main import main
from fathoms.data.sources.arrays import digit_sources
from fathoms.errors import WeightsError
from fathoms.evaluating.load import load_run, weights_file
from fathoms.evaluating.onnx_model import OnnxModel
from fathoms.models.build_timm import build_timm
from fathoms.models.weights import weights_of


@pytest.fixture
def digit(tmp_path):
    """A held-out digit as an image file."""
    Image.fromarray(digit_sources()[1].images[0]).save(tmp_path / "digit.png")
    return tmp_path / "digit.png"


@pytest.mark.parametrize("place", [".", "checkpoints/last", "checkpoints/best/model.safetensors"])
def test_a_run_a_checkpoint_and_a_weights_file_predict_alike(digits_run, digit, place, capsys):
    """The class and its probability are those of the model on the loader's pixels: same preprocessing."""
    assert (
        main(["predict", str(digit), "--checkpoint", str(digits_run / place), "--device", "cpu", "--json"])
        == 0
    )
    (report,) = json.loads(capsys.readouterr().out)["predictions"]
    loaded = load_run(str(digits_run / place))
    preprocessing, pixels = (
        loaded.preprocessing,
        torch.from_numpy(digit_sources()[1].images[:1, None, :, :, 0]),
    )
    chances = loaded.model((pixels / 255 - preprocessing.mean[0]) / preprocessing.std[0]).softmax(-1)[0]
    assert report["classes"][0] == loaded.classes[int(chances.argmax())]
    assert report["probabilities"][0] == pytest.approx(chances.max().item(), abs=1e-5)


def test_a_run_with_swapped_norms_is_rebuilt_with_them(tmp_path):
    words = ["--epochs", "1", "--depth", "1", "--stem-norm", "pre", "--device", "cpu"]
    swap = ["--swap-norms", "learnable_scaler"]
    assert main(["train", "--output", str(tmp_path), "--experiment", "r", *words, *swap]) == 0
    loaded = load_run(str(tmp_path / "r"))
    assert isinstance(loaded.model, ViT)
    assert any(name.endswith("ln0.a") for name, _ in loaded.model.named_parameters())


@pytest.fixture(scope="module")
def timm_run(tmp_path_factory):
    """A run folder of a timm model with random weights: two classes, its own preprocessing, no training."""
    pytest.importorskip("timm")
    folder = tmp_path_factory.mktemp("timm")
    torch.manual_seed(0)
    weights = weights_of(build_timm("timm/test_vit", 2))
    (folder / "checkpoints" / "last").mkdir(parents=True)
    save_file(dict(weights), folder / "checkpoints" / "last" / "model.safetensors")
    text = 'classes = ["blue", "red"]\n[model]\nname = "timm/test_vit"\n[recipe]\ncrop_pct = 1.0\n'
    (folder / "config.toml").write_text(text)
    return folder


@pytest.fixture
def images(tmp_path):
    """A blue and a red image, as a data set with one split."""
    for name, colour in (("blue", (20, 20, 220)), ("red", (220, 20, 20))):
        (tmp_path / "images" / "val" / name).mkdir(parents=True)
        Image.new("RGB", (180, 170), colour).save(tmp_path / "images" / "val" / name / "1.png")
    return tmp_path / "images"


def run(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_timm_run_is_loaded_with_its_classes_and_preprocessing(timm_run):
    loaded = load_run(str(timm_run))
    assert (loaded.name, loaded.config, loaded.classes) == ("timm/test_vit", None, ("blue", "red"))
    assert (loaded.image_size, loaded.in_channels, loaded.num_classes) == (160, 3, 2)
    assert loaded.preprocessing.crop_pct == 1.0
    assert not loaded.model.training


@pytest.mark.compile
def test_a_timm_run_is_validated_predicted_and_exported_with_one_result(timm_run, images, tmp_path, capsys):
    """validate, predict, the ONNX file and the weights file with its card see one model."""
    numbers = run(capsys, "validate", images, "--checkpoint", timm_run, "--device", "cpu")["results"]
    rows = run(capsys, "predict", images, "--checkpoint", timm_run, "--device", "cpu")["predictions"]
    assert [Path(row["file"]).parent.name for row in rows] == ["blue", "red"]
    right = [row["probabilities"][row["classes"].index(Path(row["file"]).parent.name)] for row in rows]
    loss = -sum(map(math.log, right)) / 2
    assert numbers[str(images)]["loss"] == pytest.approx(loss, rel=1e-4)

    target = tmp_path / "m.onnx"
    exported = run(capsys, "export", timm_run, "--output", target)
    assert max(exported["differences"].values()) < 1e-4
    card = json.loads((tmp_path / "m.onnx.json").read_text())
    assert (card["model"], card["classes"], card["input"]) == (
        "timm/test_vit",
        ["blue", "red"],
        [3, 160, 160],
    )
    batch = torch.randn(3, 3, 160, 160)
    with torch.no_grad():
        expected = load_run(str(timm_run)).model(batch)
    torch.testing.assert_close(OnnxModel(target)(batch), expected, atol=1e-4, rtol=1e-4)

    run(capsys, "export", timm_run, "--format", "timm", "--output", tmp_path / "m.safetensors")
    again = load_run(str(tmp_path / "m.safetensors"))
    assert (again.name, again.classes) == ("timm/test_vit", ("blue", "red"))
    with torch.no_grad():
        assert torch.equal(again.model(batch), expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["predict", "IMAGES", "--checkpoint", "RUN", "--attention", "maps"],
            "--attention: timm's models show none",
        ),
        (["export", "RUN", "--depth", "3"], "--depth: a timm model is built as its name says; leave it out"),
        (["export", "RUN", "--fold", "--format", "timm"], "use onnx or torch-export, or leave --fold out"),
        (["validate", "IMAGES", "--checkpoint", "RUN", "--image-size", "64"], "--image-size: a timm model"),
        (
            ["validate", "IMAGES", "--checkpoint", "RUN", "--model", "timm/test_vti"],
            "did you mean 'test_vit'",
        ),
    ],
    ids=["attention", "depth", "fold", "size", "name"],
)
def test_what_cannot_be_done_with_a_timm_model_is_refused_in_one_line(
    timm_run, images, words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    places = {"RUN": str(timm_run), "IMAGES": str(images)}
    assert main([places.get(word, word) for word in words]) == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


def test_a_timm_model_larger_than_its_weights_file_is_refused_before_it_is_built(tmp_path):
    pytest.importorskip("timm")
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.toml").write_text('classes = ["a"]\n[model]\nname = "timm/vit_huge_patch14_224"\n')
    with pytest.raises(FathomsError, match="holds 3 numbers, but the config describes a model of 630,"):
        load_run(str(tmp_path))


@pytest.mark.parametrize("text", ["[", "7"])
def test_a_file_that_is_not_a_card_is_refused(digits_run, tmp_path, text):
    shutil.copy(digits_run / "checkpoints" / "best" / "model.safetensors", tmp_path)
    (tmp_path / "model.safetensors.json").write_text(text)
    with pytest.raises(FathomsError, match="model.safetensors.json: (not readable as JSON|a JSON object)"):
        load_run(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "c/cells/a-seed0",
            r"a-seed0: the comparison kept no checkpoints of this run \(--keep\); compare again",
        ),
        ("run", "run: this run has no checkpoint; give the training command again, or another run"),
        ("c/none", "none: holds no weights; give a run folder"),
    ],
)
def test_a_run_without_checkpoints_says_why(tmp_path, place, said):
    (tmp_path / place / "checkpoints").mkdir(parents=True)
    if place != "c/none":
        (tmp_path / place / "config.toml").write_text("")
    (tmp_path / "c").mkdir(exist_ok=True)
    (tmp_path / "c/plan.json").write_text("{}")
    with pytest.raises(WeightsError, match=said):
        weights_file(tmp_path / place, ema=True)


def test_metrics_are_those_of_the_weights_that_are_loaded(digits_run, tmp_path):
    run = shutil.copytree(digits_run, tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "best": {**summary["best"], "epoch": 2}}))
    assert set(load_run(run).metrics) == {"status", "epoch", "best"}, "the test score is of the last weights"
    last = run / "checkpoints" / "last"
    assert set(load_run(last).metrics) == {"status", "epoch", "last", "test"}
    # Where there is an average, it is what was evaluated.
    shutil.copy(last / "model.safetensors", last / "ema.safetensors")
    (last / "manifest.json").unlink()
    assert "test" in load_run(last).metrics
    assert set(load_run(last, ema=False).metrics) == {"status", "epoch"}
    (run / "summary.json").write_text(json.dumps({**summary, "best": {**summary["best"], "epoch": 3}}))
    assert {"best", "test"} <= set(load_run(run).metrics), "the best epoch is the last one"


def test_a_name_that_no_system_takes_is_no_file():
    with pytest.raises(WeightsError, match="no such file or folder"):
        load_run("a" * 100_000)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_weights_that_are_no_numbers_are_refused(kind, tmp_path):
    from safetensors.torch import save_file

    state = {key: value.to(kind) for key, value in create_model("vit_digits").state_dict().items()}
    # Too large for float32, which the model computes in.
    state["head.bias"][0] = float("nan") if kind == torch.float32 else 1e300
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"head\.bias holds values that are not finite"):
        load_run(tmp_path / "w.safetensors", "vit_digits")


def test_bare_weights_of_timm_bring_their_number_of_classes(tmp_path):
    save_file(build_timm("timm/test_vit", 7).state_dict(), tmp_path / "bare.safetensors")
    loaded = load_run(tmp_path / "bare.safetensors", model="timm/test_vit")
    assert loaded.num_classes == 7
