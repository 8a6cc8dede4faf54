"""A run from its command to its folder: what it writes, how it resumes, how it ends."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tomllib

import pytest
import torch

from fathoms import FathomsError
from fathoms.training import checkpoint_files as checkpoints
from fathoms.training.checkpoint_load import read as read_checkpoint
from rank_pairs import ends, pair
from tiny_runs import Killed, kill_before_update


def test_a_run_leaves_the_folder_that_everything_else_reads(digit_runs):
    outcome = digit_runs.train("--probe-interval", "10")
    folder = digit_runs.folder()
    assert outcome.code == 0
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["model"]["depth"] == 2
    assert config["recipe"]["epochs"] == 2
    assert config["classes"] == [str(digit) for digit in range(10)]
    metrics = digit_runs.metrics()
    assert [(row["epoch"], row["split"]) for row in metrics] == [
        (1, "train"),
        (1, "val"),
        (2, "train"),
        (2, "val"),
        (2, "test"),
    ]
    assert all({"step", "loss", "top1", "top5", "lr"} <= row.keys() for row in metrics)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["best"]["highest"] == max(row["top1"] for row in metrics if row["split"] == "val")
    assert json.loads((folder / "environment.json").read_text())["versions"]["torch"]
    assert json.loads((folder / "probe.jsonl").read_text().splitlines()[0])["sites"]
    for name in ("last", "best"):
        assert checkpoints.why_unusable(folder / "checkpoints" / name) is None


def test_norms_of_every_layer_are_recorded_and_change_nothing(digit_runs):
    words = ["--drop-path", "0.2", "--mixup", "0.3"]
    digit_runs.train(*words, name="plain")
    digit_runs.train(*words, "--probe-interval", "7", name="probed")
    assert digit_runs.same_weights("plain", "probed")
    lines = digit_runs.lines("probe.jsonl", "probed")
    assert [line["step"] for line in lines] == [7, 14, 21, 28]
    for line in lines:
        sites = [(site["block"], site["branch"]) for site in line["sites"]]
        assert sites == [(f"blocks.{i}", branch) for i in range(2) for branch in ("attn", "mlp")]
        assert all(site[name] > 0 for site in line["sites"] for name in ("stream", "gradient", "weights"))
    assert not (digit_runs.folder("plain") / "probe.jsonl").exists()


EVERYTHING = [
    *("--mixup", "0.4", "--cutmix", "1", "--reprob", "0.3", "--aug-repeats", "2", "--drop-path", "0.2"),
    *("--grad-accum-steps", "2", "--model-ema", "--model-ema-decay", "0.9", "--aa", "rand-m5-mstd0.5"),
    *("--clip-grad", "1", "--residual", "layerscale", "--recovery-interval", "2"),
]


@pytest.mark.parametrize(
    "words",
    [
        EVERYTHING,
        ["--opt", "lamb"],
        ["--opt", "muon", "--residual", "prores", "--residual-warmup", "0.6", "--model-ema"],
        ["--bce-loss", "--amp"],
        ["--precision", "bf16", "--grad-accum-steps", "2", "--residual", "layerscale"],
    ],
    ids=str,
)
def test_a_killed_run_resumes_bit_for_bit(digit_runs, words):
    words = [*words] if "--recovery-interval" in words else [*words, "--recovery-interval", "2"]
    digit_runs.train(*words, name="whole")
    trainer = digit_runs.trainer(*words, name="cut")
    kill_before_update(trainer, 3)
    with pytest.raises(Killed):
        trainer.run()
    assert digit_runs.state("cut")["updates"] == 2
    assert digit_runs.train(*words, name="cut").code == 0
    assert digit_runs.same("whole", "cut")
    # Whatever the precision, a checkpoint holds the float32 master weights.
    kept = digit_runs.weights("cut").items()
    assert all(weight.dtype == torch.float32 for name, weight in kept if name.startswith("model/"))


def test_a_run_killed_before_its_first_checkpoint_writes_no_row_twice(digit_runs):
    words = ["--epochs", "4", "--eval-interval", "2", "--probe-interval", "4"]
    digit_runs.train(*words, name="whole")
    trainer = digit_runs.trainer(*words, name="cut")
    kill_before_update(trainer, 17)
    with pytest.raises(Killed):
        trainer.run()
    assert digit_runs.metrics("cut")
    assert not digit_runs.checkpoint("cut").exists()
    digit_runs.train(*words, name="cut")
    assert digit_runs.metrics("whole") == digit_runs.metrics("cut")
    probes = [[row["step"] for row in digit_runs.lines("probe.jsonl", name)] for name in ("whole", "cut")]
    assert probes[0] == probes[1]


def test_the_rows_of_a_run_that_lost_its_checkpoints_are_not_dropped_unasked(digit_runs):
    digit_runs.train("--epochs", "1")
    shutil.rmtree(digit_runs.folder() / "checkpoints")
    before = digit_runs.metrics("run")
    for words, message in ((["--resume", "never"], "holds a run already"), ([], "holds a run that is done")):
        with pytest.raises(FathomsError, match=message):
            digit_runs.train("--epochs", "1", *words)
    assert digit_runs.metrics("run") == before


def test_a_resume_that_forgets_its_place_does_not_match(digit_runs):
    """The negative control: with the position in the epoch reset, the comparison above must fail."""
    digit_runs.train("--recovery-interval", "2", name="whole")
    trainer = digit_runs.trainer("--recovery-interval", "2", name="cut")
    kill_before_update(trainer, 3)
    with pytest.raises(Killed):
        trainer.run()
    folder = digit_runs.checkpoint("cut")
    kept = read_checkpoint(folder)
    checkpoints.save(folder.parent, dataclasses.replace(kept, state={**kept.state, "batch": 0}))
    digit_runs.train("--recovery-interval", "2", name="cut")
    assert not digit_runs.same_weights("whole", "cut")


def test_a_finished_run_gives_the_same_summary_again(digit_runs):
    first, again = digit_runs.train(), digit_runs.train()
    assert again.summary == first.summary
    assert len(digit_runs.metrics("run")) == 5


def test_a_summary_keeps_what_earlier_processes_met(digit_runs):
    trainer = digit_runs.trainer("--recovery-interval", "2")
    trainer.context.data.train.stats.note_bad("train/7.jpg", "truncated", 10)
    trainer.loop.state.peak_memory = 1234
    kill_before_update(trainer, 3)
    with pytest.raises(Killed):
        trainer.run()
    for _ in range(2):
        summary = digit_runs.train("--recovery-interval", "2").summary
        assert summary["bad_images"] == {"train/7.jpg": "truncated"}
        assert summary["peak_memory"] == 1234
        assert summary["last"]["epoch"] == 2


def test_a_run_that_must_be_new_refuses_an_old_folder(digit_runs):
    digit_runs.train("--epochs", "1")
    with pytest.raises(FathomsError, match="holds a run already"):
        digit_runs.train("--epochs", "1", "--resume", "never")


def test_a_damaged_checkpoint_is_skipped_with_a_warning(digit_runs):
    digit_runs.train("--recovery-interval", "2")
    folder = digit_runs.folder() / "checkpoints"
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


KINDS = "ddp ddp_bf16 ddp_accumulated ddp_autocast ddp_autocast_fp32_stream"
KINDS += " fsdp fsdp_muon fsdp_everything fsdp_autocast fsdp_autocast_fp32_stream"


@pytest.mark.parametrize("kind", KINDS.split())
def test_two_ranks_train_as_one_does(digit_runs, kind):
    """Same global batch, so the same samples in the same update; sums in another order, hence 1e-4."""
    common = ["--crop", "whole"]
    if kind == "ddp":
        common += ["--mixup", "0.4", "--cutmix", "1", "--probe-interval", "7"]
    if kind == "ddp_bf16":
        common += ["--precision", "bf16", "--residual", "layerscale", "--readout", "class_attention"]
    if "autocast" in kind:
        # Each rank rounds its gradients to bfloat16, so the runs part with the length of their steps.
        common += ["--precision", kind.partition("_")[2], "--lr", "0.001"]
    if kind == "ddp_accumulated":
        common += ["--grad-accum-steps", "3"]
    if kind == "fsdp_muon":
        common += ["--opt", "muon"]
    if kind.endswith("everything"):
        common += ["--opt", "lamb"]
        common += ["--model-ema", "--model-ema-decay", "0.9", "--train-feature-decay", "0.1"]
    digit_runs.train(*common, name="one")
    words = digit_runs.words(*common, "--batch-size", "48", name=kind)
    words += [] if kind.startswith("ddp") else ["--fsdp"]
    results = ends(pair(digit_runs.root, words, words))
    assert [code for _, code in results] == [0, 0], results[0][0][-8000:]
    alone, together = digit_runs.metrics("one"), digit_runs.metrics(kind)
    assert [row["loss"] for row in together] == pytest.approx([row["loss"] for row in alone], abs=1e-4)
    assert together[-1]["images"] == alone[-1]["images"] == 359


def test_initial_weights_may_be_a_run_or_a_checkpoint_folder(digit_runs):
    digit_runs.train("--epochs", "1", name="first")
    best = digit_runs.folder("first") / "checkpoints" / "best"
    models = [
        digit_runs.trainer("--initial-checkpoint", str(path), name="second").model
        for path in (digit_runs.folder("first"), best, best / "model.safetensors")
    ]
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[2])
