"""A run from its command to its folder: what it writes, how it goes on, how it ends."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fathoms import FathomsError
from fathoms.cli import train as train_command
from fathoms.cli.main import main
from fathoms.cli.parse import parse
from fathoms.train import checkpoint as checkpoints
from fathoms.train.distributed import World
from fathoms.train.loop import Trainer, step_seed

TINY = [
    "--depth",
    "2",
    "--dim",
    "16",
    "--heads",
    "2",
    "--epochs",
    "2",
    "--batch-size",
    "96",
    "--device",
    "cpu",
]


def job(tmp_path, *words, name="run"):
    return train_command.make_job(
        parse(train_command, "train", [*TINY, "--output", str(tmp_path), "--experiment", name, *words])
    )


def train(run, **options):
    torch.set_num_threads(1)
    return Trainer(run, World(0, 1, torch.device("cpu")), show=False, **options).run()


def weights_in(folder):
    return {
        name: load_file(folder / "checkpoints" / "last" / f"{name}.safetensors")
        for name in ("model", "optimizer", "ema")
        if (folder / "checkpoints" / "last" / f"{name}.safetensors").is_file()
    }


def same(a, b):
    return a.keys() == b.keys() and all(
        a[part].keys() == b[part].keys() and all(torch.equal(a[part][key], b[part][key]) for key in a[part])
        for part in a
    )


def rows(folder):
    """Metrics without what a clock decides."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "images_per_second"} for line in lines]


def test_a_run_leaves_the_folder_that_everything_else_reads(tmp_path):
    outcome = train(job(tmp_path, "--probe-interval", "10"))
    folder = tmp_path / "run"
    assert outcome.code == 0
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["model"]["depth"] == 2
    assert config["recipe"]["epochs"] == 2
    assert config["classes"] == [str(digit) for digit in range(10)]
    metrics = rows(folder)
    assert [(row["epoch"], row["split"]) for row in metrics] == [
        (0, "train"),
        (0, "val"),
        (1, "train"),
        (1, "val"),
    ]
    assert all({"step", "loss", "top1", "top5", "lr"} <= row.keys() for row in metrics)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["best"]["top1"] == max(row["top1"] for row in metrics if row["split"] == "val")
    assert json.loads((folder / "environment.json").read_text())["versions"]["torch"]
    assert json.loads((folder / "probe.jsonl").read_text().splitlines()[0])["sites"]
    for name in ("last", "best"):
        assert checkpoints.why_unusable(folder / "checkpoints" / name) is None


def test_norms_of_every_layer_are_recorded_and_change_nothing(tmp_path):
    words = ["--drop-path", "0.2", "--mixup", "0.3"]
    train(job(tmp_path, *words, name="plain"))
    train(job(tmp_path, *words, "--probe-interval", "7", name="probed"))
    assert same(weights_in(tmp_path / "plain"), weights_in(tmp_path / "probed"))
    lines = [json.loads(line) for line in (tmp_path / "probed" / "probe.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [7, 14, 21, 28]
    for line in lines:
        sites = [(site["block"], site["branch"]) for site in line["sites"]]
        assert sites == [(f"blocks.{i}", branch) for i in range(2) for branch in ("attn", "mlp")]
        assert all(site[name] > 0 for site in line["sites"] for name in ("stream", "gradient", "weights"))
    assert not (tmp_path / "plain" / "probe.jsonl").exists()


EVERYTHING = [
    *("--mixup", "0.4", "--cutmix", "1", "--reprob", "0.3", "--aug-repeats", "2", "--drop-path", "0.2"),
    *("--grad-accum-steps", "2", "--model-ema", "--model-ema-decay", "0.9", "--aa", "rand-m5-mstd0.5"),
    *("--clip-grad", "1", "--residual", "layerscale", "--recovery-interval", "2"),
]


class Killed(BaseException):
    """Stands for a kill: nothing of the run gets a chance to clean up its state."""


def kill_after(trainer, updates):
    update = trainer._update

    def counted(batch):
        if trainer.updates == updates:
            raise Killed
        update(batch)

    trainer._update = counted


@pytest.mark.parametrize(
    "words",
    [
        EVERYTHING,
        ["--opt", "lamb"],
        ["--opt", "muon"],
        ["--bce-loss", "--amp"],
        ["--precision", "bf16", "--grad-accum-steps", "2", "--residual", "layerscale"],
    ],
    ids=str,
)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, words):
    words = [*words] if "--recovery-interval" in words else [*words, "--recovery-interval", "2"]
    train(job(tmp_path, *words, name="whole"))
    trainer = Trainer(job(tmp_path, *words, name="cut"), World(0, 1, torch.device("cpu")), show=False)
    kill_after(trainer, 3)
    with pytest.raises(Killed):
        trainer.run()
    assert json.loads((tmp_path / "cut" / "checkpoints" / "last" / "state.json").read_text())["updates"] == 2
    assert train(job(tmp_path, *words, name="cut")).code == 0
    assert same(weights_in(tmp_path / "whole"), weights_in(tmp_path / "cut"))
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")
    # Whatever the precision, a checkpoint holds the float32 masters.
    kept = weights_in(tmp_path / "cut")["model"].values()
    assert all(weight.dtype == torch.float32 for weight in kept)


def test_a_resume_that_forgets_its_place_does_not_match(tmp_path):
    """The negative control: with the position in the epoch reset, the comparison above must fail."""
    train(job(tmp_path, "--recovery-interval", "2", name="whole"))
    cut = job(tmp_path, "--recovery-interval", "2", name="cut")
    trainer = Trainer(cut, World(0, 1, torch.device("cpu")), show=False)
    kill_after(trainer, 3)
    with pytest.raises(Killed):
        trainer.run()
    folder = tmp_path / "cut" / "checkpoints" / "last"
    kept = checkpoints.read(folder)
    checkpoints.save(folder.parent, dataclasses.replace(kept, state={**kept.state, "step": 0}))
    train(job(tmp_path, "--recovery-interval", "2", name="cut"))
    assert not same(weights_in(tmp_path / "whole"), weights_in(tmp_path / "cut"))


def test_a_finished_run_says_the_same_again(tmp_path):
    first, again = train(job(tmp_path)), train(job(tmp_path))
    assert again.summary == first.summary
    assert len(rows(tmp_path / "run")) == 4


def test_a_run_that_must_be_new_refuses_an_old_folder(tmp_path):
    train(job(tmp_path, "--epochs", "1"))
    with pytest.raises(FathomsError, match="holds a run already"):
        train(job(tmp_path, "--epochs", "1", "--resume", "never"))


def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path):
    train(job(tmp_path, "--recovery-interval", "2"))
    folder = tmp_path / "run" / "checkpoints"
    spoilt = folder / "last" / "model.safetensors"
    data = bytearray(spoilt.read_bytes())
    data[-5] ^= 1
    spoilt.write_bytes(bytes(data))
    with pytest.warns(UserWarning, match="damaged .model.safetensors is not what was saved."):
        assert checkpoints.newest(folder) == folder / "previous"
    shutil.rmtree(folder / "previous")
    with (
        pytest.raises(FathomsError, match="no checkpoint is whole"),
        pytest.warns(UserWarning, match="damaged"),
    ):
        checkpoints.newest(folder)


def test_twenty_steps_on_fixed_data_give_the_stored_losses(tmp_path):
    """The golden run: 1e-4 across CPUs, equal bits twice on the same one."""
    golden = [2.30854, 2.29921, 2.27230]
    losses = []
    for name in ("one", "two"):
        train(job(tmp_path, "--epochs", "3", "--batch-size", "200", "--lr", "0.003", name=name))
        losses.append([row["loss"] for row in rows(tmp_path / name) if row["split"] == "train"])
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(golden, abs=1e-4)


def test_each_step_has_a_seed_of_its_own():
    places = list(itertools.product(range(3), range(3), range(3), range(2)))
    assert len({step_seed(*place) for place in places}) == len(places)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder data set of two classes that differ in colour."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for index, name in enumerate(("blue", "red")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 90, (40, 48, 3), dtype=np.uint8)
                pixels[..., 2 - 2 * index] += 150
                Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")
    return root


SEED_TRAIN = (
    "--weight-decay 0.02 --opt lamb --aa rand-m7-mstd0.5 --warmup-epoch 0 --epochs 2 --sched custom --mixup 0.1 "
    "--cutmix 1 --batch-size 4 --workers 14 --clip-grad 14 --grad-accum-steps 8 --lr 0.005 --amp --amp-dtype bfloat16 "
    "--torchcompile inductor --epoch-factor 0.8 --epoch-threshold 0.5 --train-feature-decay 0.1 --attn-extra-loss 0.03 "
    "--attn-extra-loss-layers 6"
)


@pytest.mark.compile
def test_learnable_scalers_own_lines_run_to_the_end(photos, tmp_path, capsys):
    """Seed 001's train and validate lines; epochs and batch cut down, two of the 36 blocks, smaller images."""
    model = ["--model", "vit_learnable_scaler_embed_dim192_patch16_head3_depth24"]
    small = [
        "--depth",
        "2",
        "--img-size",
        "32",
        "--output",
        str(tmp_path),
        "--experiment",
        "seed",
        "--device",
        "cpu",
    ]
    assert main(["train", str(photos), *model, *SEED_TRAIN.split(), *small]) == 0
    kept = tmp_path / "seed" / "checkpoints" / "last"
    line = ["--checkpoint", str(kept), "--amp", "--amp-dtype", "bfloat16", "--torchcompile", "inductor"]
    capsys.readouterr()
    assert main(["validate", str(photos / "val"), *line, "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][str(photos / "val")]
    assert told["images"] == 16
    assert set(told["per_class"]) == {"blue", "red"}


def test_photos_are_learnt_and_validated_with_the_same_result(photos, tmp_path, capsys):
    words = [
        str(photos),
        "--model",
        "vit_tiny_patch16_224",
        "--depth",
        "2",
        "--dim",
        "48",
        "--image-size",
        "32",
    ]
    words += ["--epochs", "6", "--batch-size", "8", "--lr", "0.003", "--crop-pct", "1.0", "--device", "cpu"]
    assert main(["train", *words, "--output", str(tmp_path), "--experiment", "p", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["best"]["top1"] == 100.0
    table = str(tmp_path / "confusion.csv")
    line = ["validate", "--checkpoint", str(tmp_path / "p" / "checkpoints" / "last"), "--device", "cpu"]
    assert main([*line, "--json", "--confusion", table]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][str(photos)]
    assert told["top1"] == summary["last"]["top1"]
    assert told["loss"] == pytest.approx(summary["last"]["loss"], rel=1e-5)
    assert (tmp_path / "confusion.csv").read_text().splitlines()[0] == "true class,blue,red"


def test_robustness_sets_and_real_labels_are_measured_in_one_command(photos, tmp_path, capsys):
    """Small folders in the layouts of ImageNet-V2 (numbers) and -R (some of the names), and a ReaL file."""
    words = [
        str(photos),
        "--model",
        "vit_tiny_patch16_224",
        "--depth",
        "1",
        "--dim",
        "24",
        "--image-size",
        "32",
    ]
    words += [
        "--epochs",
        "1",
        "--batch-size",
        "8",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
        "--experiment",
        "r",
    ]
    assert main(["train", *words]) == 0
    shutil.copytree(photos / "val" / "blue", tmp_path / "v2" / "0")
    shutil.copytree(photos / "val" / "red", tmp_path / "v2" / "1")
    shutil.copytree(photos / "val" / "red", tmp_path / "subset" / "red")
    (tmp_path / "real.json").write_text(json.dumps([[0, 1]] * 7))
    capsys.readouterr()
    line = ["validate", "--checkpoint", str(tmp_path / "r"), "--device", "cpu", "--json"]
    line += ["--robustness", str(tmp_path / "v2"), str(tmp_path / "subset")]
    assert main([*line, "--real-labels", str(tmp_path / "real.json")]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert told[str(photos)]["real_top1"] == 100.0
    assert told[str(tmp_path / "v2")]["top1"] == told[str(photos)]["top1"]
    assert told[str(tmp_path / "subset")]["top1"] == 100.0


@pytest.mark.parametrize("swap", [[], ["--swap-norms", "learnable_scaler"]], ids=["batchnorm", "scaler"])
def test_a_cnn_of_timms_trains(photos, tmp_path, swap):
    pytest.importorskip("timm")
    words = [
        str(photos),
        "--model",
        "timm/resnet10t",
        "--epochs",
        "1",
        "--batch-size",
        "8",
        "--device",
        "cpu",
    ]
    words += ["--lr", "1e-5", "--output", str(tmp_path), "--experiment", "cnn", *swap]
    trainer = Trainer(
        train_command.make_job(parse(train_command, "train", words)),
        World(0, 1, torch.device("cpu")),
        show=False,
    )
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    assert ("LearnableScaler2d" in kinds, "BatchNormAct2d" in kinds or "BatchNorm2d" in kinds) == (
        bool(swap),
        not swap,
    )
    assert trainer.run().code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["--model", "vit_tny_patch16_224"], "no model is called 'vit_tny_patch16_224'; did you mean"),
        (["--lr", "0"], "train.lr=0.0 is no learning rate"),
        (["--lr", "-1"], "train.lr=-1.0 is no learning rate"),
        (["--batch-size", "5000"], "do not fill one step of 5000"),
        (["--device", "cuda:7"], "this machine has no usable GPU"),
        (["--output", "/proc/nothing"], "cannot be written"),
        (["--recipe", "cait"], "no recipe is called 'cait'; did you mean 'cait_400'"),
        (["--teacher", "vit_digits", "--distillation-type", "hard"], "an untrained teacher teaches noise"),
        (["--distillation-type", "hard"], "belong together"),
        (["--freeze", "blocks.99*"], "'blocks.99*' matches no parameter"),
        (["--attn-extra-loss", "0.1"], "looks at no block"),
        (["--experiment", "../up"], "use letters, digits"),
        (["--model", "timm/resnet50", "--depth", "3"], "timm's models have no such switch"),
        (["--fsdp"], "start them with torchrun"),
        (
            ["--fsdp", "--probe-interval", "5"],
            "--probe-interval looks into fathoms models that are not sharded",
        ),
        (["--momentum", "0.9"], "--momentum would not be used: it needs --opt sgd, momentum or muon"),
    ],
)
def test_mistakes_are_one_line_and_exit_2_and_leave_nothing(tmp_path, capsys, monkeypatch, words, message):
    if "cuda:7" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--epochs", "1", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"y_train": [0, 1, 2, -1] * 3}, "y_train holds no labels from 0"),
        ({"y_train": [0, 1, 2, 7] * 3, "classes": ["a", "b", "c"]}, "labels run to 7 for 3 classes"),
        ({"y_test": [0, 1, 2, 4] * 3}, "class '3' has no pictures to train on"),
        ({"y_train": [0.5, 1, 2, 1] * 3}, "y_train"),
        ({"y_train": [0, 1, 2]}, "12"),
    ],
    ids=["negative", "beyond the names", "only in the test", "no whole number", "too few"],
)
def test_labels_that_cannot_be_are_refused(tmp_path, capsys, labels, message):
    images = np.zeros((12, 8, 8, 3), np.uint8)
    fine = {"x_train": images, "y_train": [0, 1, 2] * 4, "x_test": images, "y_test": [0, 1, 2] * 4}
    np.savez(tmp_path / "set.npz", **{name: np.array(value) for name, value in (fine | labels).items()})
    words = ["--model", "vit_digits", "--in-channels", "3", "--batch-size", "4", "--device", "cpu"]
    assert main(["train", str(tmp_path / "set.npz"), *words, "--output", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_of_another_architecture_is_refused_before_anything_is_written(tmp_path, capsys):
    from fathoms import create_model, save_weights

    save_weights(create_model("vit_digits", depth=3), tmp_path / "other.safetensors")
    words = [*TINY, "--output", str(tmp_path / "runs"), "--initial-checkpoint"]
    for path, message in (
        ("other.safetensors", "does not fit the model"),
        ("none.safetensors", "no such file"),
        ("model.pth", "no such file"),
    ):
        assert main(["train", *words, str(tmp_path / path)]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    (tmp_path / "model.pth").write_bytes(b"x")
    assert main(["train", *words, str(tmp_path / "model.pth")]) == 2
    assert "only .safetensors files are opened" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_empty_class_folder_and_an_unreadable_file_are_named(photos, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(photos, broken)
    (broken / "train" / "green").mkdir()
    words = ["--model", "vit_tiny_patch16_224", "--image-size", "32", "--depth", "1", "--batch-size", "8"]
    words += ["--output", str(tmp_path / "runs"), "--device", "cpu", "--epochs", "1"]
    assert main(["train", str(broken), *words]) == 2
    assert "green" in capsys.readouterr().err
    (broken / "train" / "green").rmdir()
    (broken / "train" / "red" / "3.jpg").write_bytes(b"not a picture")
    assert main(["train", str(broken), *words]) == 2
    assert "red/3.jpg" in capsys.readouterr().err


def test_a_checked_data_set_that_changed_is_refused_by_name(photos, tmp_path, capsys):
    checked = tmp_path / "checked"
    shutil.copytree(photos, checked)
    assert main(["data", "check", str(checked)]) in (0, 1)
    shutil.copy(checked / "train" / "red" / "3.jpg", checked / "train" / "red" / "new.jpg")
    capsys.readouterr()
    assert main(["train", str(checked), "--output", str(tmp_path / "runs"), "--device", "cpu"]) == 2
    assert "red/new.jpg was added since the check" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp_everything"])
def test_two_processes_train_as_one_does(tmp_path, kind):
    """Same global batch, so the same samples in the same step; sums in another order, hence 1e-4."""
    common = [*TINY, "--output", str(tmp_path), "--crop", "whole"]
    if kind == "ddp":
        common += ["--mixup", "0.4", "--cutmix", "1", "--probe-interval", "7"]
    if kind == "fsdp_everything":
        common += ["--opt", "lamb", "--model-ema", "--model-ema-decay", "0.9", "--train-feature-decay", "0.1"]
    train(train_command.make_job(parse(train_command, "train", [*common, "--experiment", "one"])))
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "fathoms",
    ]
    words += ["train", *common, "--experiment", kind, "--batch-size", "48"]
    words += [] if kind == "ddp" else ["--fsdp"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    alone, together = rows(tmp_path / "one"), rows(tmp_path / kind)
    assert [row["loss"] for row in together] == pytest.approx([row["loss"] for row in alone], abs=1e-4)
    assert together[-1]["images"] == alone[-1]["images"] == 359
