"""CUDA graphs: replayed batches give the gradients and numbers of eager ones."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.training import run as run_module
from fathoms.training import step as step_module
from fathoms.training.compiling import WARMUP, CaptureError, GraphedStep, _Capture, same_layout
from fathoms.training.speed import settle
from pretended_graphs import PretendedGraph, pretend_capture
from tiny_models import LAYERSCALE, labelled_batch
from tiny_runs import Killed, kill_before_update


def test_a_graph_without_a_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        GraphedStep(lambda x: (x,), [])


@pytest.mark.plain
def test_a_graphs_bookkeeping_gathers_gradients_and_knows_shapes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(GraphedStep, "_capture", pretend_capture)
    results = {}
    for launch in ("eager", "graph"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)

        def compute(x, model=model):
            loss = model(x).square().mean()
            loss.backward()
            return (loss.detach(),)

        run = GraphedStep(compute, model.parameters()) if launch == "graph" else compute
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(24):
            rows = 4 if step % 4 else 6
            x = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) / (10 + step)
            losses.append(run(x)[0].item())
            if step % 3 != 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        results[launch] = [*losses, *model.weight.flatten().tolist()]
        if launch == "graph":
            assert len(run.captures) == 2
    assert results["graph"] == pytest.approx(results["eager"], rel=1e-6)


@pytest.mark.plain
def test_a_gradient_that_waits_outlives_a_graph_that_gives_none(monkeypatch):
    """Each size of image has a graph of its own, and may use a parameter that the others do not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    used, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    gradient = torch.full((2,), 3.0)
    graph = PretendedGraph(None, (torch.ones(2),), (), ())
    monkeypatch.setattr(graph, "replay", lambda: None)
    step = GraphedStep(lambda x: (x,), [used, other])
    monkeypatch.setattr(step, "_capture", lambda x: _Capture(graph, x, x, [gradient, None]))
    for _ in range(WARMUP):
        step(torch.ones(2))
    used.grad, other.grad = torch.ones(2), torch.ones(2)
    step(torch.ones(2))
    assert used.grad.tolist() == [4.0, 4.0]
    assert other.grad.tolist() == [1.0, 1.0]


class CountedStep(GraphedStep):
    """On the CPU, with pretended graphs; notes the compilations of every call."""

    def __init__(self, compute, parameters, _warn=None):
        self.compute, self.parameters = compute, [p for p in parameters if p.requires_grad]
        self.calls, self.captures, self.failed, self.compiled = Counter(), {}, False, []

    def __call__(self, *inputs):
        before = compilations()
        outputs = super().__call__(*inputs)
        self.compiled.append(compilations() - before)
        return outputs


def compilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def write_folder(root):
    rng = np.random.default_rng(0)
    for split, count in (("train", 70), ("val", 9)):
        for number in range(count):
            path = root / split / str(number % 2) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(path)
    return root


ARRAYS, FOLDER = ("arrays",), ("folder", "--batch-size", "8", "--workers", "1")
GREY = (*ARRAYS, "--in-channels", "1")
PENALTIES = "--train-feature-decay 0.1 --attn-extra-loss 0.03 --attn-extra-loss-layers 1"


@pytest.mark.compile
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (GREY, "model"),
        (GREY, f"model {PENALTIES}"),
        (GREY, "blocks --precision bf16 --probe-interval 2"),
        (GREY, "model --precision bf16 --grad-accum-steps 3 --model-ema"),
        (ARRAYS, "model --precision autocast --mixup 0.2 --drop-path 0.1"),
        (ARRAYS, "blocks --precision bf16 --grad-accum-steps 3 --model-ema --clip-grad 1"),
        (FOLDER, "model --in-channels 1"),
        (FOLDER, f"model --precision bf16 {PENALTIES}"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_nothing_compiles_once_a_run_has_warmed_up(tiny_runs, tmp_path, monkeypatch, layout, words):
    """Neither in the capture and its replays, nor after an evaluation, a short update or a resume."""
    monkeypatch.setattr(GraphedStep, "_capture", pretend_capture)
    monkeypatch.setattr(
        step_module, "GraphedStep", lambda compute, parameters, *_: CountedStep(compute, parameters)
    )
    if layout[0] == "folder":
        tiny_runs.data = write_folder(tmp_path / "images")
    scope, *words = words.split()

    def graphed(*args):
        speed, lines = settle(*args)
        return replace(speed, compile_scope=scope, launch="graph"), lines

    monkeypatch.setattr(run_module, "settle", graphed)
    words = [*layout[1:], *words, "--torchcompile", "aot_eager"]
    words += ["--depth", "2", "--epochs", "3", "--recovery-interval", "1"]
    for killed in (True, False):
        trainer = tiny_runs.trainer(*words)
        if killed:
            kill_before_update(trainer, trainer.context.updates_per_epoch + 1)
        with pytest.raises(Killed) if killed else contextlib.nullcontext():
            trainer.run()
        step = trainer.loop.stepper.forward_backward
        assert len(step.captures) == 1
        assert not any(step.compiled[WARMUP:])
    assert compilations() > 0


@pytest.mark.plain
def test_a_capture_that_fails_leaves_the_same_numbers_and_one_line(monkeypatch):
    """The gradients that wait and the random numbers are those of a run without a graph."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def fail(step, _inputs):
        for parameter in step.parameters:
            parameter.grad = None
        raise CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphedStep, "_capture", fail)
    weight, said = nn.Parameter(torch.ones(2)), []

    def compute(x):
        loss = (weight * x).sum()
        loss.backward()
        return (loss.detach(),)

    step = GraphedStep(compute, [weight], said.append)
    for _ in range(WARMUP + 3):
        step(torch.tensor([1.0, 2.0]))
    assert weight.grad.tolist() == [WARMUP + 3, 2.0 * (WARMUP + 3)]
    assert said == [
        "no CUDA graph, kernels are launched one by one: the capture failed "
        "(operation not permitted when stream is capturing)"
    ]


def test_a_static_copy_has_the_strides_of_what_it_copies():
    images = torch.arange(24.0).view(2, 3, 2, 2)
    for given in (images, images[:, :1], images.to(memory_format=torch.channels_last), images.mT):
        copy = same_layout(given)
        assert torch.equal(copy, given)
        assert copy.stride() == given.stride()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_steps_give_the_numbers_of_launched_ones():
    results = {}
    for launch in ("eager", "graph"):
        torch.manual_seed(0)
        model = ViT(LAYERSCALE.replace(drop_path=0.3)).cuda()
        images, labels = (x.cuda() for x in labelled_batch())

        def compute(images, labels, model=model):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            return (loss.detach(),)

        run = GraphedStep(compute, model.parameters()) if launch == "graph" else compute
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(12):
            torch.manual_seed(step)
            losses.append(run(images + 0.1 * step, labels)[0].item())
            # Every third update gathers two gradients.
            if step % 3 != 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        results[launch] = losses
    assert results["eager"] == results["graph"]
