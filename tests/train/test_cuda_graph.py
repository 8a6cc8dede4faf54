"""CUDA graphs: replayed batches give the gradients and numbers of eager ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.train.precision.cuda_graph import WARMUP, GraphedStep, _Capture
from tiny_models import LAYERSCALE, labelled_batch


def test_a_graph_without_a_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        GraphedStep(lambda x: (x,), [])


class PretendedGraph:
    """Replays by running again, into the tensors of the capture, as a graph does."""

    def __init__(self, step, inputs, outputs, gradients):
        self.step, self.inputs, self.outputs, self.gradients = step, inputs, outputs, gradients

    def replay(self):
        for parameter in self.step.parameters:
            parameter.grad = None
        results = self.step.compute(*self.inputs)
        made = [parameter.grad for parameter in self.step.parameters]
        for held, new in zip((*self.outputs, *self.gradients), (*results, *made), strict=True):
            held.copy_(new)


def pretend_capture(step, inputs):
    static = tuple(x.clone() for x in inputs)
    for parameter in step.parameters:
        parameter.grad = None
    outputs = step.compute(*static)
    gradients = [parameter.grad for parameter in step.parameters]
    return _Capture(PretendedGraph(step, static, outputs, gradients), static, outputs, gradients)


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
