"""Precision policies: what is bfloat16, what stays float32, and what a step does with both."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.config import ViTConfig
from fathoms.models.vit import ViT
from fathoms.train.precision.compile import compile_blocks, kept_for_backward
from fathoms.train.precision.cuda_graph import WARMUP, GraphedStep, _Capture
from fathoms.train.precision.master_weights import WorkingCopy
from fathoms.train.precision.policy import PRECISIONS, set_stream
from fathoms.train.recipe.recipe import Recipe

CONFIG = ViTConfig(
    image_size=16, patch_size=4, dim=32, heads=2, depth=3, num_classes=5, residual="layerscale", readout="cls"
)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, 16, 16, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def make():
    torch.manual_seed(0)
    return ViT(CONFIG)


def gradients(model, module, copies=None):
    """Gradients of a model's own parameters, computed through `module`."""
    images, labels = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(module(images).float(), labels)
    loss.backward()
    if copies is not None:
        copies.pull_gradients()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_stream_has_the_dtype_of_the_policy(precision):
    model = make()
    set_stream(model, precision)
    module = WorkingCopy(model).module if precision == "bf16" else model
    seen = []
    module.blocks[-1].register_forward_hook(lambda _module, _inputs, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "fp32"):
        module(batch()[0])
    wide = precision in ("fp32", "autocast_fp32_stream")
    assert seen == [torch.float32 if wide else torch.bfloat16]


def test_a_policy_leaves_nothing_of_the_one_before():
    model = make()
    set_stream(model, "autocast_fp32_stream")
    set_stream(model, "autocast")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.forward_features(batch()[0]).dtype == torch.bfloat16


def test_a_precision_given_by_hand_overrides_the_amp_of_a_recipe():
    assert Recipe.join({"amp": True}, {"precision": "bf16"}).policy == "bf16"
    assert Recipe.join({"amp": True}, {}).policy == "autocast"
    assert Recipe().policy == "fp32"


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="--amp would not be used"):
        Recipe(precision="fp32", amp=True)
    with pytest.raises(ConfigError, match="float16"):
        Recipe(precision="bf16", amp_dtype="float16")
    with pytest.raises(ConfigError, match="needs --torchcompile"):
        Recipe(compile_scope="blocks")
    with pytest.raises(ConfigError, match="fathoms models"):
        set_stream(nn.Linear(2, 2), "autocast_fp32_stream")
    with pytest.raises(ConfigError, match="no list of blocks"):
        compile_blocks(nn.Linear(2, 2))


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
        model = ViT(CONFIG.replace(drop_path=0.3)).cuda()
        images, labels = (x.cuda() for x in batch())

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


@pytest.mark.compile
# torch's own tracing looks at the gradient of the tensor between two compiled blocks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_give_the_models_numbers():
    plain, compiled = make(), make()
    compile_blocks(compiled, backend="eager", fullgraph=True)
    assert torch.equal(plain(batch()[0]), compiled(batch()[0]))


def kept_and_gradients(keep):
    """Bytes that a compiled block keeps for its backward pass, in tensors of the stream's size, and its gradients."""
    torch.compiler.reset()
    module = WorkingCopy(make()).module
    # The partitioner that inductor uses, without compiling its kernels.
    compile_blocks(module, backend="aot_eager_decomp_partition", dynamic=False)
    block = module.blocks[0]
    own = {parameter.data_ptr() for parameter in module.parameters()}
    x = torch.randn(64, 17, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with kept_for_backward(keep), torch.autocast("cpu", dtype=torch.bfloat16):
        block(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = block(x)
        out.float().square().sum().backward()
    return sum(kept.values()) / x.nbytes, {name: p.grad for name, p in block.named_parameters()}


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_lean_blocks_keep_a_third_less_and_give_the_same_gradients():
    everything, expected = kept_and_gradients("all")
    lean, got = kept_and_gradients("lean")
    assert lean < 0.7 * everything, (lean, everything)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
