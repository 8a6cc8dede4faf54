"""fathoms validate on runs of every kind: the numbers of the run again, and files of them."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import tomllib

import pytest
from PIL import Image

import fathoms
from fathoms.cli import train
from fathoms.cli.flags.parse import parse
from fathoms.cli.main import main
from fathoms.data.sources.splits import open_roles
from fathoms.evaluating import metrics
from fathoms.evaluating.load import load_run
from fathoms.evaluating.preprocessing import Preprocessing
from fathoms.models.zoo import IMAGENET
from fathoms.training.build import augment_options, eval_preprocessing

TINY = ["--model", "vit_tiny_patch16_224", "--depth", "1", "--dim", "24", "--image-size", "32"]
QUICK = ["--epochs", "1", "--batch-size", "8", "--device", "cpu"]


def run(*words):
    return main([str(word) for word in words])


def printed_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "timm/resnet10t", "--lr", "1e-4"],
        ["--model", "timm/resnet10t", "--lr", "1e-5", "--swap-norms", "learnable_scaler"],
        [*TINY, "--swap-norms", "dyt"],
    ],
    ids=["timm", "timm swapped", "vit swapped"],
)
def test_a_run_of_any_kind_is_measured_again_with_the_same_result(photos, tmp_path, capsys, words):
    pytest.importorskip("timm")
    assert run("train", photos, *words, *QUICK, "--output", tmp_path, "--experiment", "r", "--json") == 0
    last = printed_json(capsys)["last"]
    assert run("validate", "--checkpoint", tmp_path / "r", "--device", "cpu", "--json") == 0
    again = printed_json(capsys)["results"][str(photos)]
    assert again["top1"] == last["top1"]
    assert again["loss"] == pytest.approx(last["loss"], rel=1e-4)
    if "timm/resnet10t" in words:
        assert run("validate", "--checkpoint", tmp_path / "r", "--image-size", "64") == 2
        assert "--image-size: a timm model is built as its name says" in capsys.readouterr().err


def test_numbers_are_written_as_tables(photos, vit, tmp_path, capsys):
    files = {name: tmp_path / name for name in ("all.json", "all.csv", "class.csv", "confusion.csv")}
    line = [
        "validate",
        photos,
        "--checkpoint",
        vit,
        "--device",
        "cpu",
        "--robustness",
        photos / "val",
        "--json",
    ]
    line += ["--per-class", files["class.csv"], "--confusion", files["confusion.csv"]]
    assert run(*line, "--results-file", files["all.json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    results = found["results"]
    best = vit / "checkpoints" / "best" / "model.safetensors"
    assert found["weights"] == str(best)
    assert (
        f"weights: {best}, of the best epoch on val; for the last, give {vit / 'checkpoints' / 'last'}\n"
        in printed.err
    )
    assert json.loads(files["all.json"].read_text())["results"] == results
    assert run(*line, "--results-file", files["all.csv"], "--overwrite") == 0
    rows = {
        name: list(csv.DictReader(path.read_text().splitlines()))
        for name, path in files.items()
        if path.suffix == ".csv"
    }
    assert [row["data"] for row in rows["all.csv"]] == [str(photos), str(photos / "val")]
    assert float(rows["all.csv"][0]["top1"]) == results[str(photos)]["top1"]
    assert [(row["class"], row["images"]) for row in rows["class.csv"]] == 2 * [("blue", "6"), ("red", "6")]
    for row in rows["class.csv"]:
        assert float(row["top1"]) == results[row["data"]]["per_class"][row["class"]]
    confusion = [[int(row["blue"]), int(row["red"])] for row in rows["confusion.csv"]]
    assert confusion == [list(row) for row in results[str(photos)]["confusion"]]


def test_averaged_weights_are_measured_unless_the_plain_ones_are_asked_for(photos, tmp_path, capsys):
    """The averaged ones have the loss that training measured, the plain ones that of a run without an average."""
    ema, losses = ["--model-ema", "--model-ema-decay", "0.9"], {}
    for name, more in (("ema", ema), ("plain", [])):
        words = [*TINY, *QUICK, *more, "--lr", "1e-2", "--output", tmp_path, "--experiment", name]
        assert run("train", photos, *words) == 0
    capsys.readouterr()
    for words in ("ema", "ema --no-use-ema", "plain"):
        name, *flag = words.split()
        assert run("validate", "--checkpoint", tmp_path / name, *flag, "--json") == 0
        losses[words] = printed_json(capsys)["results"][str(photos)]["loss"]
    trained = json.loads((tmp_path / "ema" / "summary.json").read_text())["last"]["loss"]
    assert losses["ema"] == pytest.approx(trained, rel=1e-5)
    assert losses["ema --no-use-ema"] == losses["plain"] != pytest.approx(trained, rel=1e-3)


def test_mistakes_are_found_before_anything_is_measured(photos, vit, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "evaluate", lambda *_args, **_options: pytest.fail("it was measured"))
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "odd" / "val" / "green").mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(tmp_path / "odd" / "val" / "green" / "1.png")
    (tmp_path / "x.npz").write_bytes(b"no archive")
    for words, message in (
        (["--confusion", "table.txt"], "this file is written as .csv; change the ending"),
        (["--results-file", tmp_path / "none" / "r.json"], "its folder cannot be written"),
        (["--real-labels", tmp_path / "real.json"], "ReaL labels are a list of lists"),
        (["--robustness", tmp_path / "nowhere"], "nowhere: no such file or folder"),
        (["--robustness", tmp_path / "odd"], "the model has no class 'green'"),
        (["--robustness", tmp_path / "x.npz"], "x.npz"),
        (["--device", "cuda:7"], "GPU"),
        (["--device", "mps"], "--device mps: Apple GPUs have no float64"),
        (["--amp-dtype", "float16"], "--amp-dtype would not be used: it goes with --amp"),
        (["--split", "vla"], "--split: no split is called 'vla'; did you mean 'val'?"),
        (["--model", "vit_small_patch16_224"], "was trained with image_size 32, not 224, dim 24, not 384"),
        (["--model", "vit_smal_patch16_224"], "did you mean 'vit_small_patch16_224'"),
    ):
        assert run("validate", photos, "--checkpoint", vit, *words) == 2, words
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1


def test_a_class_without_images_gets_a_line(photos, vit, tmp_path, capsys):
    data = shutil.copytree(photos, tmp_path / "photos")
    shutil.rmtree(data / "val" / "red")
    (data / "val" / "red").mkdir()
    assert run("validate", data, "--checkpoint", vit, "--device", "cpu") == 0
    line = f"{data}: has no images of 1 of its 2 classes ('red'); the metrics are of the others\n"
    assert line in capsys.readouterr().err
    assert run("validate", photos, "--checkpoint", vit, "--device", "cpu") == 0
    assert "has no images of" not in capsys.readouterr().err


def test_data_that_a_run_names_and_that_is_not_there_is_said_to_come_from_the_run(
    photos, vit, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(vit, "run")
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text().replace(str(photos), "../img"))
    assert run("validate", "--checkpoint", "run") == 2
    printed = capsys.readouterr().err
    assert f"../img: run was trained on it, and it is not there, seen from {tmp_path}; give DATA" in printed
    assert run("validate", photos, "--checkpoint", "run", "--device", "cpu") == 0


def test_arrays_are_judged_whole_and_cropping_them_is_refused(tmp_path, capsys):
    words = [
        "--depth",
        "1",
        "--dim",
        "16",
        "--heads",
        "2",
        "--epochs",
        "1",
        "--batch-size",
        "400",
        "--device",
        "cpu",
    ]
    assert run("train", *words, "--output", tmp_path, "--experiment", "d") == 0
    assert run("validate", "--checkpoint", tmp_path / "d", "--crop-pct", "0.8") == 2
    assert "arrays are evaluated whole" in capsys.readouterr().err
    assert run("validate", "--checkpoint", tmp_path / "d", "--crop-pct", "1.0") == 0


def test_a_checkpoint_is_fine_tuned_at_another_size_and_on_other_classes(photos, vit, tmp_path, capsys):
    start = vit / "checkpoints" / "best" / "model.safetensors"
    common = ["--model", "vit_tiny_patch16_224", "--depth", "1", "--dim", "24", *QUICK, "--output", tmp_path]
    common += ["--initial-checkpoint", start]
    words = [
        "train",
        photos,
        *common,
        "--image-size",
        "48",
        "--freeze",
        "stem.*,blocks.*",
        "--experiment",
        "large",
    ]
    assert run(*words) == 0
    from safetensors.torch import load_file

    before = load_file(start)
    after = load_file(tmp_path / "large" / "checkpoints" / "last" / "model.safetensors")
    assert (before["position.table"].shape[0], after["position.table"].shape[0]) == (4, 9)
    same = {
        name
        for name, value in after.items()
        if value.shape == before[name].shape and value.equal(before[name])
    }
    assert {name for name in after if name.startswith(("stem.", "blocks."))} <= same
    assert "head.weight" not in same

    three = tmp_path / "three"
    for split in ("train", "val"):
        for name in ("a", "b", "c"):
            (three / split / name).mkdir(parents=True)
            for image in range(4):
                Image.new("RGB", (40, 40), (image * 40, 9, 9)).save(three / split / name / f"{image}.png")
    capsys.readouterr()
    small = ["train", three, *common, "--image-size", "32", "--batch-size", "4"]
    assert run(*small, "--experiment", "refused") == 2
    assert "head" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
    assert run(*small, "--initial-head", "new", "--experiment", "other") == 0
    assert run("train", *QUICK, "--initial-head", "new", "--output", tmp_path) == 2
    assert "--initial-head would not be used" in capsys.readouterr().err


def test_a_model_saved_from_a_run_is_measured_as_the_run_is(vit, photos, tmp_path, capsys):
    """Its card has the mean and std of the run; where a card has none, a line says what is assumed."""
    model = load_run(vit).model
    model.save_pretrained(tmp_path / "saved")
    fresh = fathoms.ViT.from_pretrained(tmp_path / "saved")
    fresh.card = {}
    fresh.save_pretrained(tmp_path / "bare")
    capsys.readouterr()
    measured = {}
    for place in (vit, tmp_path / "saved", tmp_path / "bare"):
        assert run("validate", photos, "--checkpoint", place, "--device", "cpu", "--json") == 0
        shown = capsys.readouterr()
        measured[place] = json.loads(shown.out.splitlines()[-1])["results"]
        assert ("taken by default: mean 0.485 0.456 0.406" in shown.err) == (place.name == "bare")
    assert measured[vit] == measured[tmp_path / "saved"]
    for words, said in (([], True), (["--mean", "0.5", "0.5", "0.5", "--std", "1", "1", "1"], False)):
        assert run("predict", photos / "val", "--checkpoint", tmp_path / "bare", *words) == 0
        assert ("--mean, --std, --crop-pct and --interp" in capsys.readouterr().err) == said


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "cait_xxs24_224", "vit_digits"])
def test_a_model_brings_its_data_configuration_to_training_and_flags_override_it(photos, model):
    def job(*more):
        words = [photos, "--model", model, "--in-channels", 3, "--image-size", 32, *more]
        return train.make_job(parse(train, "train", [str(word) for word in words]))

    source = open_roles(str(photos), None).train
    own = eval_preprocessing(job(), 32, source)
    half, whole = model == "vit_tiny_patch16_224", model != "vit_tiny_patch16_224"
    assert own == Preprocessing(
        1.0 if whole else 0.9, "bicubic", *([(0.5,) * 3] * 2 if half else IMAGENET.values())
    )
    options = augment_options(job().recipe)
    assert (options.mean, options.std) == (own.mean, own.std)
    known = model != "vit_digits"
    line = own.described(model, whole=False)
    assert line.endswith(f"as {model} has it" if known else f"{model} has none of its own")
    words = ("--mean", 0.1, 0.2, 0.3, "--crop-pct", 0.8, "--interpolation", "bilinear")
    given = eval_preprocessing(job(*words), 32, source)
    assert given == own.changed(mean=(0.1, 0.2, 0.3), crop_pct=0.8, interpolation="bilinear")
    if known:
        said = given.described(model, whole=False)
        assert f"by the recipe or a flag; {model} itself has crop_pct {own.crop_pct}" in said
        assert "std" not in said.split("itself has")[1]


def test_the_start_says_the_preprocessing_and_the_run_records_it(vit, photos, tmp_path, capsys):
    assert run("train", photos, *TINY, *QUICK, "--output", tmp_path) == 0
    said = " ".join(capsys.readouterr().err.split())
    name = tomllib.loads((vit / "config.toml").read_text())["model"]["name"]
    assert (
        f"preprocessing: mean 0.5 0.5 0.5, std 0.5 0.5 0.5, crop_pct 0.9, bicubic, as {name} has it" in said
    )
    assert load_run(str(vit)).preprocessing == Preprocessing(0.9, "bicubic", (0.5,) * 3, (0.5,) * 3)


@pytest.mark.compile
def test_an_onnx_file_is_measured_as_the_run_it_came_from(vit, photos, tmp_path, capsys):
    place = shutil.copytree(vit, tmp_path / "run")
    assert run("export", place, "--fold") == 0
    results = {}
    for checkpoint in (place, place / "model.onnx"):
        capsys.readouterr()
        assert run("validate", photos, "--checkpoint", checkpoint, "--device", "cpu", "--json") == 0
        (results[checkpoint.suffix],) = printed_json(capsys)["results"].values()
    assert results[".onnx"]["confusion"] == results[""]["confusion"]
    assert results[".onnx"]["loss"] == pytest.approx(results[""]["loss"], abs=1e-5)
    for flag in (["--amp"], ["--torchcompile", "inductor"], ["--use-ema"], ["--image-size", "64"]):
        assert run("validate", "--checkpoint", place / "model.onnx", *flag) == 2
        assert f"{flag[0]}: " in capsys.readouterr().err
    assert run("export", place / "model.onnx") == 2
    assert "is an exported file already" in capsys.readouterr().err


def test_a_file_that_is_not_onnx_and_a_missing_runtime_are_said_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    words = ["validate", "digits", "--checkpoint", tmp_path / "model.onnx"]
    assert run(*words) == 2
    message = capsys.readouterr().err
    assert "model.onnx: not a readable ONNX file (" in message
    assert message.count("\n") == 1
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name)
    )
    assert run(*words) == 2
    assert "onnxruntime is not installed; pip install 'fathoms[onnx]'" in capsys.readouterr().err


def test_a_folder_called_digits_is_measured_and_not_the_built_in_ones(
    vit, photos, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, "digits")
    assert run("validate", "digits", "--checkpoint", vit, "--device", "cpu", "--json") == 0
    assert printed_json(capsys)["results"]["./digits"]["images"] == 12
