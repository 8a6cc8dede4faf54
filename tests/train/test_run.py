"""A run from its command to its folder: what it writes, how it goes on, how it ends."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
import tomllib

import pytest
import torch
from safetensors.torch import load_file

from fathoms import FathomsError
from fathoms.cli import train as train_command
from fathoms.cli.parse import parse
from fathoms.train.checkpoint import folder as checkpoints
from fathoms.train.distributed import World
from fathoms.train.loop import Trainer
from fathoms.train.step import step_seed

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
        if trainer.course.updates == updates:
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


def test_a_run_killed_before_its_first_checkpoint_writes_no_row_twice(tmp_path):
    words = ["--epochs", "4", "--eval-interval", "2", "--probe-interval", "4"]
    train(job(tmp_path, *words, name="whole"))
    trainer = Trainer(job(tmp_path, *words, name="cut"), World(0, 1, torch.device("cpu")), show=False)
    kill_after(trainer, 17)
    with pytest.raises(Killed):
        trainer.run()
    assert rows(tmp_path / "cut")
    assert not (tmp_path / "cut" / "checkpoints" / "last").exists()
    train(job(tmp_path, *words, name="cut"))
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")
    probes = [(tmp_path / name / "probe.jsonl").read_text().splitlines() for name in ("whole", "cut")]
    assert [json.loads(line)["step"] for line in probes[0]] == [
        json.loads(line)["step"] for line in probes[1]
    ]


def test_the_rows_of_a_run_that_lost_its_checkpoints_are_not_dropped_unasked(tmp_path):
    train(job(tmp_path, "--epochs", "1"))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = rows(tmp_path / "run")
    for words, said in ((["--resume", "never"], "holds a run already"), ([], "holds a run that is done")):
        with pytest.raises(FathomsError, match=said):
            train(job(tmp_path, "--epochs", "1", *words))
    assert rows(tmp_path / "run") == before


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
        pytest.raises(FathomsError, match="no checkpoint is whole; remove the folder"),
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


@pytest.mark.parametrize("kind", ["ddp", "ddp_bf16", "fsdp", "fsdp_muon", "fsdp_everything"])
def test_two_processes_train_as_one_does(tmp_path, kind):
    """Same global batch, so the same samples in the same step; sums in another order, hence 1e-4."""
    common = [*TINY, "--output", str(tmp_path), "--crop", "whole"]
    if kind == "ddp":
        common += ["--mixup", "0.4", "--cutmix", "1", "--probe-interval", "7"]
    if kind == "ddp_bf16":
        common += ["--precision", "bf16", "--residual", "layerscale", "--readout", "class_attention"]
    if kind == "fsdp_muon":
        common += ["--opt", "muon"]
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
    words += [] if kind.startswith("ddp") else ["--fsdp"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-8000:]
    alone, together = rows(tmp_path / "one"), rows(tmp_path / kind)
    assert [row["loss"] for row in together] == pytest.approx([row["loss"] for row in alone], abs=1e-4)
    assert together[-1]["images"] == alone[-1]["images"] == 359
