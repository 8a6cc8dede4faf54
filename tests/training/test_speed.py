"""The choice of precision, compilation and launch: a function of job and device alone, kept by a run that resumes."""

from __future__ import annotations

import json
import tomllib
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import parse
from fathoms.cli.main import main
from fathoms.errors import ConfigError
from fathoms.training import speed as speed_module
from fathoms.training.compiling import hide_advice
from fathoms.training.master_weights import ComputeCopy
from fathoms.training.recipe import Recipe
from fathoms.training.speed import KNOWN_CAPABILITIES, PRECISIONS, Machine, Speed, choose, set_stream
from tiny_models import layerscale_vit, random_images
from tiny_runs import Killed, kill_before_update

H200 = Machine("cuda", "NVIDIA H200", (9, 0))
CPU = Machine("cpu", "cpu")
LONG = 100_000
FAST = Speed("bf16", "inductor", "blocks", "graph")


def job(*words):
    return train_command.make_job(parse(train_command, "train", ["somewhere", *words]))


def chosen(*words, machine=H200, batches=LONG):
    return choose(job(*words), machine, batches).speed


@pytest.mark.parametrize("capability", KNOWN_CAPABILITIES)
def test_a_known_gpu_takes_the_fast_path_without_a_flag(capability):
    assert chosen(machine=replace(H200, capability=capability)) == FAST
    assert chosen("--amp", machine=replace(H200, capability=capability)) == FAST


@pytest.mark.parametrize(
    "machine",
    [
        CPU,
        Machine("mps", "mps"),
        Machine("cuda", "Tesla V100", (7, 0)),
        Machine("cuda", "Tesla T4", (7, 5)),
        Machine("cuda", "of tomorrow", (13, 7)),
        Machine("cuda", "AMD Instinct", None),
    ],
    ids=lambda machine: machine.name,
)
def test_any_other_device_stays_eager_float32_unless_asked(machine):
    assert chosen(machine=machine) == Speed()
    assert chosen("--amp", machine=machine) == Speed("autocast")
    assert chosen("--torchcompile", "inductor", machine=machine) == Speed("fp32", "inductor", "blocks")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--no-amp"], replace(FAST, precision="fp32")),
        (["--precision", "fp32"], replace(FAST, precision="fp32")),
        (["--precision", "autocast"], replace(FAST, precision="autocast")),
        (["--amp", "--amp-dtype", "float16"], replace(FAST, precision="autocast", launch="eager")),
        (["--torchcompile", "none"], Speed("bf16")),
        (["--compile", "none"], Speed("bf16")),
        (["--teacher", "timm/x", "--distillation-type", "hard"], replace(FAST, launch="eager")),
        (["--progressive-size", "0:128,2:224"], replace(FAST, launch="eager")),
        (["--grad-checkpointing"], replace(FAST, launch="eager")),
        (["--train-feature-decay", "0.1"], replace(FAST, compile_scope="model")),
        (["--attn-extra-loss", "0.1", "--attn-extra-loss-layers", "2"], replace(FAST, compile_scope="model")),
        (["--fsdp"], Speed("autocast")),
        (["--model", "timm/vit_tiny_patch16_224"], Speed("autocast", "inductor")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_asked_is_taken_and_what_cannot_be_is_left_out(words, expected):
    assert chosen(*words) == expected


def test_several_ranks_launch_kernels_one_by_one_and_shard_float32_weights():
    eight = replace(H200, ranks=8)
    assert chosen(machine=eight) == replace(FAST, launch="eager")
    assert chosen("--fsdp", machine=eight) == Speed("autocast")
    with pytest.raises(ConfigError, match="--precision bf16: --fsdp shards float32 weights"):
        chosen("--fsdp", "--precision", "bf16", machine=eight)


def test_a_machine_without_a_compiler_does_not_compile():
    assert chosen(machine=replace(H200, no_compiler="no C compiler")) == Speed("bf16", launch="graph")


@pytest.mark.parametrize(
    ("words", "batches", "compiles"),
    [
        # CIFAR-10, ViT 192x12 on 4x4 patches, batches of 512: one epoch and six.
        (["--image-size", "32", "--patch-size", "4", "--dim", "192", "--heads", "3"], 98, False),
        (["--image-size", "32", "--patch-size", "4", "--dim", "192", "--heads", "3"], 588, True),
        (["--recipe", "digits"], 900, False),
        (["--model", "timm/vit_tiny_patch16_224"], 999, False),
        (["--model", "timm/vit_tiny_patch16_224"], 1000, True),
    ],
)
def test_a_short_run_is_not_compiled(words, batches, compiles):
    assert chosen(*words, "--batch-size", "512", batches=batches).compiles == compiles


def test_the_line_says_what_was_chosen_and_why():
    assert choose(job(), H200, LONG).describe(H200) == (
        "speed: bf16, blocks compiled by inductor, CUDA graph; chosen for NVIDIA H200"
    )
    assert choose(job("--grad-checkpointing"), H200, 1).describe(H200) == (
        "speed: bf16, not compiled (the run is too short for it to pay), kernels launched one by one "
        "(--grad-checkpointing); chosen for NVIDIA H200"
    )
    assert choose(job(), CPU, LONG).describe(CPU) == (
        "speed: fp32, not compiled, kernels launched one by one: on a CPU"
    )


def pretend(monkeypatch, device):
    """Let a run on the CPU believe in another device."""
    monkeypatch.setattr(speed_module, "machine_of", lambda world: replace(device, ranks=world.size))


def used(runs):
    return tomllib.loads((runs.folder() / "config.toml").read_text())["speed"]


def test_a_run_that_resumes_keeps_what_it_began_with(tiny_runs, monkeypatch):
    """It began where bf16 was chosen, and resumes on a CPU, which would choose fp32."""
    with monkeypatch.context() as patched:
        pretend(patched, replace(H200, no_compiler="no C compiler"))
        trainer = tiny_runs.trainer("--torchcompile", "none", "--recovery-interval", "3")
        assert trainer.learner.compute_copy is not None
        kill_before_update(trainer, 4)
        with pytest.raises(Killed):
            trainer.run()
    assert used(tiny_runs)["precision"] == "bf16"
    state = tiny_runs.checkpoint() / "state.json"
    assert json.loads(state.read_text())["speed"] == vars(Speed("bf16"))
    resumed = tiny_runs.trainer("--recovery-interval", "3")
    assert resumed.learner.speed == Speed("bf16")
    assert resumed.speed_lines[0].endswith("as its checkpoint records")
    with pytest.raises(
        ConfigError, match=r"other settings \(--precision: bf16 -> fp32\).*--allow-change prec"
    ):
        tiny_runs.train("--precision", "fp32")
    changed = tiny_runs.trainer("--recovery-interval", "3", "--allow-change", "precision")
    assert changed.learner.speed == Speed()
    assert changed.run().code == 0


def test_mixed_precision_asked_for_against_the_record_is_refused(tiny_runs):
    trainer = tiny_runs.trainer("--recovery-interval", "3")
    kill_before_update(trainer, 4)
    with pytest.raises(Killed):
        trainer.run()
    with pytest.raises(ConfigError, match=r"--precision: fp32 -> autocast"):
        tiny_runs.train("--amp")


@pytest.mark.plain
def test_a_device_that_changes_is_named(monkeypatch):
    recorded = {**vars(FAST), "device": "NVIDIA A100"}
    pretend(monkeypatch, CPU)
    world = type("World", (), {"size": 1})()
    speed, lines = speed_module.settle(job("--amp"), world, LONG, recorded)
    assert speed == replace(FAST, launch="eager")
    assert lines[1] == "resumes on cpu instead of NVIDIA A100: the same settings, but bits may differ"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def train_on_gpu(runs, name, *words):
    """A short run on the GPU: what it used, and its rows."""
    assert main(["train", *runs.words(*words, "--device", "cuda", name=name)]) == 0
    return tomllib.loads((runs.folder(name) / "config.toml").read_text())["speed"]


@pytest.mark.gpu
@needs_gpu
def test_what_a_gpu_chooses_is_what_its_flags_would_ask_for(tiny_runs, monkeypatch):
    """Bit for bit: the choice adds nothing of its own."""
    monkeypatch.setitem(speed_module.PAYS_AFTER, "blocks", 0.0)
    chosen = train_on_gpu(tiny_runs, "chosen")
    assert (chosen["precision"], chosen["launch"]) == ("bf16", "graph")
    flags = [word for name in ("precision", "torchcompile") for word in (f"--{name}", chosen[name])]
    assert train_on_gpu(tiny_runs, "asked", *flags) == chosen
    assert tiny_runs.same("chosen", "asked")


CHOICES = [
    "",
    "--no-amp",
    "--precision autocast",
    "--torchcompile none",
    "--train-feature-decay 0.1 --attn-extra-loss 0.03 --attn-extra-loss-layers 2",
    "--grad-checkpointing",
    "--grad-accum-steps 2 --clip-grad 1 --model-ema",
    "--amp --amp-dtype float16",
    "--opt muon --drop-path 0.2 --norm rmsnorm --qk-norm rmsnorm",
    "--readout class_attention --attention talking_heads --residual layerscale",
    "--norm learnable_scaler --mlp swiglu --position rope --readout mean",
]


@pytest.mark.parametrize("words", CHOICES)
def test_every_choice_that_is_tested_on_a_gpu_is_built_on_a_cpu(tiny_runs, monkeypatch, words):
    pretend(monkeypatch, H200)
    for scope in speed_module.PAYS_AFTER:
        monkeypatch.setitem(speed_module.PAYS_AFTER, scope, 0.0)
    monkeypatch.setattr("fathoms.training.step.GraphedStep", lambda compute, *_: compute)
    assert tiny_runs.trainer(*words.split()).learner.optimizer.param_groups


def test_advice_to_compute_float32_as_something_else_is_not_passed_on(recwarn):
    warnings.simplefilter("always")
    hide_advice()
    warnings.warn(
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.",
        stacklevel=1,
    )
    assert not recwarn


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("words", CHOICES)
def test_every_choice_trains_on_a_gpu_as_the_simplest_does(tiny_runs, monkeypatch, words):
    for scope in speed_module.PAYS_AFTER:
        monkeypatch.setitem(speed_module.PAYS_AFTER, scope, 0.0)
    plain = [word for word in words.split() if word not in ("--amp", "--no-amp", "--amp-dtype", "float16")]
    for flag in ("--precision", "--torchcompile"):
        if flag in plain:
            del plain[plain.index(flag) : plain.index(flag) + 2]
    train_on_gpu(tiny_runs, "chosen", *words.split())
    train_on_gpu(tiny_runs, "plain", *plain, "--no-amp", "--torchcompile", "none")
    ours, simplest = (
        [row["loss"] for row in tiny_runs.metrics(name) if row["split"] == "train"]
        for name in ("chosen", "plain")
    )
    assert ours == pytest.approx(simplest, rel=0.03)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_stream_has_the_dtype_of_the_policy(precision):
    model = layerscale_vit()
    set_stream(model, precision)
    module = ComputeCopy(model).module if precision == "bf16" else model
    seen = []
    module.blocks[-1].register_forward_hook(lambda _module, _inputs, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "fp32"):
        module(random_images(6))
    wide = precision in ("fp32", "autocast_fp32_stream")
    assert seen == [torch.float32 if wide else torch.bfloat16]


def test_a_policy_leaves_nothing_of_the_one_before():
    model = layerscale_vit()
    set_stream(model, "autocast_fp32_stream")
    set_stream(model, "autocast")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.forward_features(random_images(6)).dtype == torch.bfloat16


def test_a_precision_given_by_hand_overrides_the_amp_of_a_recipe():
    joined = Recipe.join({"amp": True}, {"precision": "bf16"})
    assert (joined.precision, joined.amp) == ("bf16", None)
    assert Recipe.join({"precision": "bf16"}, {"precision": "auto"}) == Recipe()


@pytest.mark.parametrize("amp", [True, False])
def test_a_flag_for_mixed_precision_overrides_the_precision_of_a_recipe(amp):
    joined = Recipe.join({"precision": "bf16"}, {"amp": amp})
    assert (joined.amp, joined.precision) == (amp, "auto")


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="--amp and --precision decide the same"):
        Recipe(precision="fp32", amp=True)
    with pytest.raises(ConfigError, match="^--no-amp and --precision decide the same; leave one of them out"):
        Recipe.join({}, {"amp": False, "precision": "bf16"})
    with pytest.raises(ConfigError, match="float16"):
        Recipe(precision="bf16", amp_dtype="float16")
    with pytest.raises(ConfigError, match="fathoms models"):
        set_stream(nn.Linear(2, 2), "autocast_fp32_stream")
