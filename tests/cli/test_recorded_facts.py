"""A run's record counts in every command that loads it; a name or a flag that says otherwise is refused."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import fathoms
from fathoms import create_model, load_weights, save_weights
from fathoms.cli import compare
from fathoms.cli.flags.parse import parse
from fathoms.cli.main import main
from fathoms.comparing.folder import job_from_json, job_to_json
from fathoms.comparing.worker import make_trainer
from fathoms.errors import FathomsError, WeightsError
from fathoms.evaluating.load import load_run

MODEL = "vit_digits"
QUICK = ["--model", MODEL, "--epochs", "1", "--batch-size", "1024", "--device", "cpu"]


def run(*words):
    return main([str(word) for word in words])


def test_a_name_that_contradicts_the_record_is_refused(tmp_path, capsys):
    """On the old code the named model was evaluated where shapes allowed it, and a false accuracy printed."""
    flags = [
        "--image-size",
        "16",
        "--in-channels",
        "3",
        "--heads",
        "2",
        "--norm",
        "dyt",
        "--final-norm",
        "rmsnorm",
    ]
    flags += ["--attn-placement", "post", "--class-token-block", "3"]
    assert run("train", *QUICK, *flags, "--output", tmp_path, "--experiment", "r") == 0
    place = tmp_path / "r"
    said = "image_size 16, not 8, in_channels 3, not 1, dim 48, not 64, depth 12, not 24, "
    said += (
        "heads 2, not 4, norm dyt, not layernorm, final_norm rmsnorm, not None, attn_placement post, not pre, "
        "residual rezero, not none, class_token_block 3, not 0; leave it out"
    )
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    for words in (
        ["validate", "--checkpoint", place, "--model", MODEL],
        ["predict", tmp_path / "image.png", "--checkpoint", place, "--model", MODEL],
        ["export", place, "--model", MODEL, "--format", "safetensors"],
        ["probe", place, "--model", MODEL],
    ):
        capsys.readouterr()
        assert run(*words) == 2, words
        line = capsys.readouterr().err
        assert line.endswith(f"--model {MODEL}: {place} was trained with {said}\n")
        assert line.count("\n") == 1
    with pytest.raises(WeightsError, match=said):
        load_run(place, MODEL)
    with pytest.raises(WeightsError, match="--heads: .* was trained with heads 2, not 4; leave it out"):
        load_run(place, heads=4)


UNLIKE = [
    "--depth",
    "2",
    "--dim",
    "24",
    "--heads",
    "2",
    "--attn-placement",
    "post",
    "--norm",
    "dyt",
    "--image-size",
    "32",
]
UNLIKE += [
    "--mean",
    "0.2",
    "0.3",
    "0.4",
    "--std",
    "0.3",
    "0.4",
    "0.5",
    "--interpolation",
    "bilinear",
    "--amp",
]
UNLIKE += ["--model", "vit_tiny_patch16_224", "--model-ema", "--model-ema-decay", "0.5", "--lr", "1e-2"]


@pytest.fixture(scope="module")
def runs(photos, tmp_path_factory):
    """Runs that differ from the defaults in every fact; the second had its norms swapped for some of the same names."""
    root = tmp_path_factory.mktemp("facts")
    for name, more in (("plain", []), ("swapped", ["--swap-norms", "derf"])):
        words = [*UNLIKE, *more, "--epochs", "3", "--batch-size", "8", "--device", "cpu", "--output", root]
        assert run("train", photos, *words, "--experiment", name) == 0
    return root


def changed(old: str, new: str) -> Callable[[Path], None]:
    """Another value in the record."""

    def flip(place: Path) -> None:
        text = (place / "config.toml").read_text()
        assert old in text
        (place / "config.toml").write_text(text.replace(old, new))

    return flip


def without_average(place: Path) -> None:
    for folder in (place / "checkpoints").iterdir():
        (folder / "ema.safetensors").unlink()


FACTS = {
    "heads": changed("heads = 2", "heads = 4"),
    "placement": changed('attn_placement = "post"', 'attn_placement = "pre"'),
    "norm": changed('norm = "dyt"', 'norm = "derf"'),
    "norms swapped": changed('swap_norms = "derf"', 'swap_norms = "dyt"'),
    "channels": changed("in_channels = 3", "in_channels = 1"),
    "image size": changed("image_size = 32", "image_size = 48"),
    "classes": changed('["blue", "red"]', '["red", "blue"]'),
    "mean": changed("mean = [0.2, 0.3, 0.4]", "mean = [0.5, 0.3, 0.4]"),
    "std": changed("std = [0.3, 0.4, 0.5]", "std = [0.6, 0.4, 0.5]"),
    "filter": changed('interpolation = "bilinear"', 'interpolation = "bicubic"'),
    "crop": changed("crop_pct = 0.9", "crop_pct = 0.7"),
    "average": without_average,
    "precision": changed("amp = true", "amp = false"),
}


def validated(place, photos, capsys):
    capsys.readouterr()
    code = run("validate", photos, "--checkpoint", place, "--device", "cpu", "--json")
    printed = capsys.readouterr()
    results = json.loads(printed.out.splitlines()[-1])["results"] if not code else printed.err
    return code, results, "measured with --amp in training" in printed.err


def predicted(place, photos, capsys):
    capsys.readouterr()
    code = run("predict", photos / "val", "--checkpoint", place, "--device", "cpu", "--json")
    printed = capsys.readouterr()
    return code, json.loads(printed.out)["predictions"] if not code else printed.err


def exported(place, photos, capsys):
    """The predictions of the file, with its card."""
    target = place / "out.safetensors"
    code = run("export", place, "--format", "safetensors", "--output", target, "--overwrite")
    found = (code, predicted(target, photos, capsys) if not code else capsys.readouterr().err)
    for file in place.glob("out.safetensors*"):
        file.unlink()
    return found


def loaded(place, photos, _):
    """Logits of an image, prepared as the record says, by name of the class."""
    try:
        model = load_run(place)
    except Exception as error:  # noqa: BLE001 - any refusal is an answer
        return 2, str(error)
    image = next((photos / "val").rglob("*.png"))
    from fathoms.evaluating.predict import predict

    (row,) = predict(model.model, [image], classes=model.classes, top=2, preprocessing=model.preprocessing)
    return 0, row.to_json()


def started(place, photos, capsys):
    """The loss of a training that starts from the run and hardly moves."""
    capsys.readouterr()
    words = [
        "--initial-checkpoint",
        place,
        "--epochs",
        "1",
        "--batch-size",
        "24",
        "--lr",
        "1e-9",
        "--device",
        "cpu",
    ]
    output = place.parent / "started"
    code = run("train", photos, *words, "--output", output, "--experiment", "r", "--json")
    printed = capsys.readouterr()
    shutil.rmtree(output, ignore_errors=True)
    return code, json.loads(printed.out.splitlines()[-1])["last"]["loss"] if not code else printed.err


def probed(place, photos, capsys):
    """What the probe measures on labelled images."""
    capsys.readouterr()
    code = run("probe", place, photos, "--batch-size", "8", "--json")
    printed = capsys.readouterr()
    if code:
        return code, printed.err
    found = json.loads(printed.out)
    # The config is read from the record, and would differ by itself.
    return code, {key: value for key, value in found.items() if key not in ("config", "model")}


def counted(place, _, capsys):
    """What a forward pass of the model is made of, without the seconds."""
    capsys.readouterr()
    code = run("cost", place, "--json", "--device", "cpu", "--measured-batch", "1")
    printed = capsys.readouterr()
    if code:
        return code, printed.err
    found = json.loads(printed.out)
    return code, [found[key] for key in ("parameters", "multiplications", "saved_bytes", "fixed_bytes")]


HARDLY = ["--epochs", "1", "--batch-size", "24", "--lr", "1e-9", "--device", "cpu"]


def taught(place, photos, capsys):
    """The loss of a student that hardly moves, beside its teacher."""
    capsys.readouterr()
    words = [
        "--teacher",
        place,
        "--distillation-type",
        "soft",
        "--distillation-alpha",
        "1",
        "--image-size",
        "32",
    ]
    # The student's own pixels are the teacher's, so that only what the record says of them can differ.
    words += [*UNLIKE[:8], "--mean", "0.2", "0.3", "0.4", "--std", "0.3", "0.4", "0.5", "--json"]
    output = place.parent / "taught"
    code = run("train", photos, *words, *HARDLY, "--model", "vit_tiny_patch16_224", "--output", output)
    printed = capsys.readouterr()
    rows = [file.read_text().splitlines()[0] for file in output.glob("*/metrics.jsonl")]
    shutil.rmtree(output, ignore_errors=True)
    return (code, printed.err) if code else (code, [json.loads(row)["loss"] for row in rows])


def compared(place, photos, _):
    """The loss of the first cell of a comparison that starts from the run, trained as a worker trains it."""
    output = place.parent / "compared"
    words = [photos, "--axis", "hflip=0,0.5", "--initial-checkpoint", place, *HARDLY, "--output", output]
    try:
        comparison = compare.make_comparison(parse(compare, "compare", [str(word) for word in words]))
        cell = comparison.cells()[0]
        outcome = make_trainer(job_from_json(job_to_json(cell.job))).run()
    except FathomsError as error:
        return 2, str(error)
    finally:
        shutil.rmtree(output, ignore_errors=True)
    return outcome.code, outcome.summary["last"]["loss"]


SHAPE = {"depth": 2, "dim": 24, "heads": 2, "attn_placement": "post", "image_size": 32, "num_classes": 2}


def put_in(place, *_):
    """What `load_weights` says of a file of the run for models of the same shapes, whose outputs it does not decide."""
    said = []
    for norm in ("dyt", "derf"):
        model = create_model("vit_tiny_patch16_224", **SHAPE, norm=norm)
        for name in ("model", "ema"):
            file = place / "checkpoints" / "last" / f"{name}.safetensors"
            try:
                load_weights(model, file)
                said.append(model.head.weight.sum().item())
            except WeightsError as error:
                said.append(str(error).partition(": ")[2])
    return 0, said


def evaluated(place, photos, _):
    """What Python's `fathoms.evaluate` measures."""
    try:
        found = fathoms.evaluate(place, photos, device="cpu")
    except FathomsError as error:
        return 2, str(error)
    return 0, (found.loss, found.per_class, found.confusion)


COMMANDS = {
    "validate": validated,
    "evaluate": evaluated,
    "predict": predicted,
    "export": exported,
    "load_run": loaded,
    "start": started,
    "probe": probed,
    "cost": counted,
    "teacher": taught,
    "compare": compared,
    "load_weights": put_in,
}
NOT_A_FACT = {
    # Counts follow from the shapes of the weights and of the images.
    *((fact, "cost") for fact in ("placement", "classes", "mean", "std", "filter", "crop", "average")),
    # A teacher sees the student's crops, and a comparison's runs are new ones.
    *((fact, "teacher") for fact in ("filter", "crop", "precision")),
    ("crop", "compare"),
    # Weights alone have no classes, pixels or precision, and positions are resized to any image size.
    *(
        (fact, "load_weights")
        for fact in ("image size", "classes", "mean", "std", "filter", "crop", "precision")
    ),
    *(("precision", command) for command in ("probe", "cost", "compare")),
    # Neither changes what the weights were trained on.
    ("precision", "predict"),
    ("precision", "evaluate"),
    ("precision", "export"),
    ("precision", "load_run"),
    ("precision", "start"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_recorded_fact_counts(command, runs, photos, tmp_path, capsys):
    """Each cell of the table: a command answers otherwise when the fact in the record is another one."""
    answers = {}
    for name in ("plain", "swapped"):
        answers[name] = COMMANDS[command](shutil.copytree(runs / name, tmp_path / name), photos, capsys)
        assert answers[name][0] == 0, answers[name]
    ignored = []
    for fact, flip in FACTS.items():
        if (fact, command) in NOT_A_FACT:
            continue
        name = "swapped" if fact == "norms swapped" else "plain"
        place = shutil.copytree(runs / name, tmp_path / "flipped" / name)
        flip(place)
        if COMMANDS[command](place, photos, capsys) == answers[name]:
            ignored.append(fact)
        shutil.rmtree(place)
    assert not ignored


@pytest.mark.parametrize("name", ["plain", "swapped"])
def test_a_weights_file_that_was_copied_out_of_its_run_keeps_its_record(name, runs, photos, tmp_path, capsys):
    """Weights of a post-norm model with two heads were measured as those of the named pre-norm model with three."""
    kept = runs / name / "checkpoints" / "last" / "model.safetensors"
    shutil.copy(kept, tmp_path)
    found, want = (validated(file, photos, capsys)[1][str(photos)] for file in (tmp_path / kept.name, kept))
    differ = {key: (found[key], want[key]) for key in want if found.get(key) != want[key]}
    assert not differ
    capsys.readouterr()
    line = ["validate", photos, "--checkpoint", tmp_path / "model.safetensors", "--device", "cpu"]
    assert run(*line, "--model", "vit_tiny_patch16_224") == 2
    assert "dim 24, not 192, depth 2, not 12, heads 2, not 3, norm" in capsys.readouterr().err
    with pytest.raises(WeightsError, match="was trained with heads 2, not 4"):
        load_run(tmp_path / "model.safetensors", heads=4)


@pytest.mark.parametrize("layout", ["fathoms", "timm"])
def test_saved_weights_say_which_model_they_are_of(layout, tmp_path):
    file = tmp_path / "w.safetensors"
    model = create_model(MODEL, depth=2, heads=2, mlp_ratio=2.0).eval()
    save_weights(model, file, layout=layout)
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(load_run(file).model(images), model(images))
    with pytest.raises(
        WeightsError, match="was trained with depth 2, not 24, heads 2, not 4, mlp_ratio 2.0, not"
    ):
        load_run(file, MODEL)
    with pytest.raises(WeightsError, match="was trained with heads 2, not 1"):
        load_weights(create_model(MODEL, depth=2, heads=1, mlp_ratio=2.0), file)


SCALER = "vit_learnable_scaler_embed_dim192_patch16_head3_depth12"


def test_a_checkpoint_of_the_author_is_judged_with_his_pixels(photos, tmp_path, capsys):
    """A last.pth.tar as his saver writes it: arguments, averaged weights, a numpy number as rate."""
    torch.manual_seed(0)
    states = {}
    for key in ("state_dict", "state_dict_ema"):
        model = create_model(SCALER, num_classes=2, image_size=32)
        save_weights(model, tmp_path / "w.safetensors", layout="timm")
        states[key] = {
            f"module.{name}": value for name, value in load_file(tmp_path / "w.safetensors").items()
        }
        half = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.9}
        model.save_pretrained(tmp_path / key, preprocessing=half, classes=["blue", "red"])
    args = argparse.Namespace(
        model=SCALER, mean=None, std=None, crop_pct=None, interpolation="", img_size=None
    )
    whole = {
        "arch": SCALER,
        **states,
        "optimizer": {"lr": np.float64(0.005)},
        "args": args,
        "metric": np.float64(7),
    }
    torch.save(whole, tmp_path / "last.pth.tar")
    args.mean = (0.1, 0.2, 0.3)
    torch.save(whole, tmp_path / "other.pth.tar")
    line = ["validate", photos, "--device", "cpu", "--json"]

    def loss(*words):
        capsys.readouterr()
        assert run(*line, *words) == 0, capsys.readouterr().err
        printed = capsys.readouterr()
        (result,) = json.loads(printed.out.splitlines()[-1])["results"].values()
        return result["loss"], printed.err

    want = {key: loss("--checkpoint", tmp_path / key)[0] for key in states}
    assert want["state_dict"] != pytest.approx(want["state_dict_ema"], rel=1e-3)
    named = ["--model", SCALER, "--checkpoint"]
    last = tmp_path / "last.pth.tar"
    found, said = loss(*named, last)
    assert found == pytest.approx(want["state_dict"], rel=1e-5)
    for part in (
        f"{last}: converted on the way, its state_dict; --use-ema takes its state_dict_ema\n",
        f"{last}: its positions are of 32-pixel images, which are taken; --image-size changes that\n",
        f"{last}: does not say how its images are prepared; taken as {SCALER} has it: mean 0.5 0.5 0.5, std 0.5",
        f"{last}: has no class names; its outputs are taken for the data's classes in order: 'blue', 'red'\n",
    ):
        assert part in said
    assert loss("--checkpoint", last)[0] == found
    assert loss(*named, last, "--use-ema")[0] == pytest.approx(want["state_dict_ema"], rel=1e-5)
    assert loss(*named, tmp_path / "w.safetensors")[0] == pytest.approx(want["state_dict_ema"], rel=1e-5)
    # What the arguments say of the pixels is a record, and what a flag says comes first.
    assert loss(*named, tmp_path / "other.pth.tar")[0] != pytest.approx(found, rel=1e-5)
    half = ["--mean", "0.5", "0.5", "0.5"]
    assert loss(*named, tmp_path / "other.pth.tar", *half)[0] == pytest.approx(found, rel=1e-5)
    assert run(*line, "--model", "vit_layernorm_192x12_16", "--checkpoint", last) == 2
    assert "was trained with norm learnable_scaler, not layernorm; leave it out" in capsys.readouterr().err
    start = [
        "train",
        photos,
        "--epochs",
        "1",
        "--batch-size",
        "24",
        "--device",
        "cpu",
        "--output",
        tmp_path,
        "--lr",
        "1e-9",
    ]
    assert (
        run(
            *start, "--model", SCALER, "--image-size", "32", "--initial-checkpoint", last, "--experiment", "r"
        )
        == 0
    )
    trained = json.loads((tmp_path / "r" / "summary.json").read_text())["last"]["loss"]
    assert trained == pytest.approx(want["state_dict"], rel=1e-4)
