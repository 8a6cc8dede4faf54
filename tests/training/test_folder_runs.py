"""Runs on a folder of images: LearnableScaler's own commands, a ViT, a CNN, and their validation."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from fathoms.cli.main import main
from fathoms.errors import ConfigError
from tiny_runs import TinyRuns, stop_after_update

PAPER_TRAIN = (
    "--weight-decay 0.02 --opt lamb --aa rand-m7-mstd0.5 --warmup-epoch 0 --epochs 2 --sched custom --mixup 0.1 "
    "--cutmix 1 --batch-size 4 --workers 14 --clip-grad 14 --grad-accum-steps 8 --lr 0.005 --amp --amp-dtype bfloat16 "
    "--torchcompile inductor --epoch-factor 0.8 --epoch-threshold 0.5 --train-feature-decay 0.1 --attn-extra-loss 0.03 "
    "--attn-extra-loss-layers 6"
)


@pytest.mark.compile
def test_learnable_scalers_own_commands_run_to_the_end(photos, tmp_path, capsys, monkeypatch):
    """The published train and validate commands; epochs and batch cut down, two of the 36 blocks, smaller images.

    What inductor would compile is traced and cut for the backward pass, and then run without its minute of C++.
    """
    compiled, asked = torch.compile, []

    def traced(model, *, backend, **options):
        asked.append(backend)
        return compiled(model, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", traced)
    model = ["--model", "vit_learnable_scaler_embed_dim192_patch16_head3_depth24"]
    small = ["--depth", "2", "--img-size", "32", "--device", "cpu"]
    small += ["--output", str(tmp_path), "--experiment", "paper"]
    assert main(["train", str(photos), *model, *PAPER_TRAIN.split(), *small]) == 0
    kept = tmp_path / "paper" / "checkpoints" / "last"
    line = ["--checkpoint", str(kept), "--amp", "--amp-dtype", "bfloat16", "--torchcompile", "inductor"]
    capsys.readouterr()
    assert main(["validate", str(photos / "val"), *line, "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][str(photos / "val")]
    assert result["images"] == 16
    assert set(result["per_class"]) == {"blue", "red"}
    assert asked == ["inductor", "inductor"]


def test_a_folder_of_images_is_learnt_and_validated_with_the_same_result(photos, tmp_path, capsys):
    words = [str(photos), "--model", "vit_tiny_patch16_224", "--depth", "2", "--dim", "48"]
    words += ["--image-size", "32", "--epochs", "6", "--batch-size", "8", "--lr", "0.003"]
    words += ["--crop-pct", "1.0", "--device", "cpu"]
    assert main(["train", *words, "--output", str(tmp_path), "--experiment", "p", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["best"]["top1"] == 100.0
    table = str(tmp_path / "confusion.csv")
    line = ["validate", "--checkpoint", str(tmp_path / "p" / "checkpoints" / "last"), "--device", "cpu"]
    assert main([*line, "--json", "--confusion", table]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][str(photos)]
    assert result["top1"] == summary["last"]["top1"]
    assert result["loss"] == pytest.approx(summary["last"]["loss"], rel=1e-5)
    assert (tmp_path / "confusion.csv").read_text().splitlines()[0] == "true class,blue,red"


def test_robustness_sets_and_real_labels_are_measured_in_one_command(photos, tmp_path, capsys):
    """Small folders in the layouts of ImageNet-V2 (numbers) and -R (some of the names), and a ReaL file."""
    words = [str(photos), "--model", "vit_tiny_patch16_224", "--depth", "1", "--dim", "24"]
    words += ["--image-size", "32", "--epochs", "1", "--batch-size", "8", "--device", "cpu"]
    words += ["--output", str(tmp_path), "--experiment", "r"]
    assert main(["train", *words]) == 0
    shutil.copytree(photos / "val" / "blue", tmp_path / "v2" / "0")
    shutil.copytree(photos / "val" / "red", tmp_path / "v2" / "1")
    shutil.copytree(photos / "val" / "red", tmp_path / "subset" / "red")
    (tmp_path / "real.json").write_text(json.dumps([[0, 1]] * 7))
    capsys.readouterr()
    line = ["validate", "--checkpoint", str(tmp_path / "r"), "--device", "cpu", "--json"]
    line += ["--robustness", str(tmp_path / "v2"), str(tmp_path / "subset")]
    assert main([*line, "--real-labels", str(tmp_path / "real.json")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert result[str(photos)]["real_top1"] == 100.0
    assert result[str(tmp_path / "v2")]["top1"] == result[str(photos)]["top1"]
    assert result[str(tmp_path / "subset")]["top1"] == 100.0


@pytest.mark.parametrize("swap", [[], ["--swap-norms", "learnable_scaler"]], ids=["batchnorm", "scaler"])
def test_a_timm_cnn_trains(photos, tmp_path, swap):
    pytest.importorskip("timm")
    flags = ["--model", "timm/resnet10t", "--epochs", "1", "--batch-size", "8", "--lr", "1e-5"]
    flags += ["--device", "cpu"]
    trainer = TinyRuns(tmp_path, flags, photos).trainer(*swap)
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    assert ("LearnableScaler2d" in kinds, "BatchNormAct2d" in kinds or "BatchNorm2d" in kinds) == (
        bool(swap),
        not swap,
    )
    assert trainer.run().code == 0
    said = [line.partition(":")[0] for line in trainer.model_lines]
    assert said == ["--swap-norms learnable_scaler"] * bool(swap)


FEW = (
    "--model vit_tiny_patch16_224 --depth 1 --dim 16 --heads 2 --image-size 16 --patch-size 8 --batch-size 8"
)


def test_a_run_on_a_folder_is_refused_when_a_file_is_replaced_by_another_of_its_size(photos, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(photos, data)
    runs = TinyRuns(tmp_path, [*FEW.split(), "--epochs", "2", "--device", "cpu"], data)
    trainer = runs.trainer(name="new")
    stop_after_update(trainer, 2)
    trainer.run()
    path = data / "train/red/0.jpg"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(
        ConfigError, match=r"changed since this run began \(train \w{12} -> \w{12}\); restore"
    ):
        runs.train(name="new")
