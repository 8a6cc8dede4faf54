"""A model is a plain module: copies, casts, wrappers and adapters find nothing hidden."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.func import functional_call

import fathoms
from fathoms import ViT, ViTConfig
from fathoms.errors import FathomsError, ShapeError
from fathoms.models.param_groups import undecayed
from fathoms.parts import LEAVES, Join
from fathoms.surgery.trial import replace_module
from tiny_models import VARIANTS, random_images
from tiny_parts import PARTS, SMALL

MODELS = (
    VARIANTS
    | PARTS
    | {"drop_path": {"drop_path": 0.5}, "rope": {"position": "rope", "readout": "mean_cls"}}
    | {"cait_distilled": {**VARIANTS["cait"], "distill_token": True, "distill_early": True}}
)
each_model = pytest.mark.parametrize("name", MODELS)


def make(name, seed=0, **more):
    """A model whose parameters are off their start, where ones and zeros would hide a mistake."""
    torch.manual_seed(seed)
    model = ViT(ViTConfig(**SMALL | MODELS[name] | more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def emptied(name, **more):
    """The model without memory, then with memory that holds anything: here NaN."""
    with torch.device("meta"):
        model = ViT(ViTConfig(**SMALL | MODELS[name] | more))
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else -1)
    return model


@each_model
def test_the_same_parameters_are_exempt_from_decay_however_the_model_came_about(name):
    model = make(name)
    exempt = undecayed(model)
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    shown = {name for name in exempt if name in matrices}
    assert shown == {
        name for name in matrices if name.endswith(("table", "queries", "positions", "distill", "registers"))
    }
    assert all(
        exempt[name] == "exempt from decay"
        for name in exempt
        if name.endswith(("gamma", "alpha", "beta")) and ".scale." in name
    )
    with torch.device("meta"):
        assigned = ViT(model.config)
    assigned.load_state_dict(model.state_dict(), assign=True)
    averaged = torch.optim.swa_utils.AveragedModel(model).module
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        cast = make(name).double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    for other in (copy.deepcopy(model), assigned, averaged, cast):
        assert undecayed(other) == exempt
    groups = [fathoms.param_groups(each, 0.1) for each in (model, copy.deepcopy(model))]
    assert [group["names"] for group in groups[0]] == [group["names"] for group in groups[1]]


def test_a_mark_of_ones_own_is_read():
    linear = torch.nn.Linear(4, 4)
    linear.weight._no_weight_decay = True
    assert undecayed(linear) == {"weight": "marked _no_weight_decay", "bias": "one-dimensional"}


@each_model
def test_weights_loaded_into_an_emptied_model_bring_its_tables(name):
    model = make(name).eval()
    expected = model(random_images())
    other = emptied(name).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(random_images()), expected)
    other = emptied(name).eval()
    fathoms.load_weights(other, dict(model.named_parameters()))
    assert torch.equal(other(random_images()), expected)
    with torch.device("meta"):
        other = ViT(model.config).eval()
    with pytest.raises(fathoms.FathomsError, match="on the meta device"):
        fathoms.load_weights(other, dict(model.named_parameters()))
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other.to("cpu")(random_images()), expected)
    # Also in training, where drop-path has its shares, and at another size, which has a matrix of its own.
    wide, images = emptied(name), random_images(size=24)
    for each in (model, wide):
        each.train().set_image_size(24)
    wide.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    first = model(images)
    torch.manual_seed(1)
    assert torch.equal(wide(images), first)


@each_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_size_then_another_dtype(name, dtype):
    model = make(name).eval()
    model.set_image_size(24)
    images = random_images(size=24)
    exact = model(images)
    logits = model.to(dtype)(images.to(dtype))
    assert logits.dtype == dtype
    assert (logits - exact).norm() <= 0.1 * exact.norm()


def uncalled(model, images):
    """Modules with parameters of their own whose forward nobody calls."""
    called = set()
    handles = [m.register_forward_hook(lambda m, *_: called.add(m)) for m in model.modules()]
    model(images)
    for handle in handles:
        handle.remove()
    owners = {name: m for name, m in model.named_modules() if m._parameters}
    return [name for name, module in owners.items() if module not in called]


@each_model
def test_every_module_with_parameters_is_called(name):
    model = make(name)
    assert uncalled(model.train(), random_images()) == uncalled(model.eval(), random_images()) == []


@each_model
def test_what_has_parameters_of_its_own_is_called_with_tensors_alone(name):
    """Tools that record what a module got, as opacus does for gradients of each image, detach every argument."""
    model, odd = make(name).eval(), []

    def record(module, inputs):
        if module._parameters and not all(isinstance(given, torch.Tensor) for given in inputs):
            odd.append(type(module).__name__)

    for module in model.modules():
        module.register_forward_pre_hook(record)
    model(random_images())
    assert odd == []


@each_model
def test_each_child_alone_sees_its_parameters_used(name):
    """What gathers a module's parameters around its call, as FSDP2 and offloading do: others are NaN meanwhile."""
    model = make(name).eval()
    expected = model(random_images())
    units = [m for m in model.modules() if isinstance(m, Join)] + [
        m for m in model.children() if not isinstance(m, torch.nn.ModuleList)
    ]
    for unit in units:
        kept = [parameter.detach().clone() for parameter in unit.parameters()]

        def fill(module, _inputs, kept=kept):
            for parameter, value in zip(module.parameters(), kept, strict=True):
                parameter.data.copy_(value)

        def spoil(module, _inputs, _output):
            for parameter in module.parameters():
                parameter.data.fill_(torch.nan)

        spoil(unit, None, None)
        unit.register_forward_pre_hook(fill)
        unit.register_forward_hook(spoil)
    assert torch.equal(model(random_images()), expected)


class LowRank(torch.nn.Module):
    """What an adapter puts around a linear, and what it merges into its weight."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.a = torch.nn.Parameter(torch.randn(2, linear.in_features) / 4)
        self.b = torch.nn.Parameter(torch.randn(linear.out_features, 2) / 4)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + x @ self.a.T @ self.b.T

    @torch.no_grad()
    def merged(self):
        self.base_layer.weight += self.b @ self.a
        return self.base_layer


@each_model
def test_adapters_on_all_linears_get_gradients_and_merge_exactly(name):
    model = make(name).eval()
    plain = model(random_images())
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    adapters = {linear: LowRank(linear) for linear in linears}
    for linear, adapter in adapters.items():
        replace_module(model, linear, adapter)
    adapted = model(random_images())
    assert not torch.allclose(adapted, plain, atol=1e-2)
    adapted.sum().backward()
    silent = [name for name, p in model.named_parameters() if name.endswith((".a", ".b")) and p.grad is None]
    assert silent == []
    for linear, adapter in adapters.items():
        replace_module(model, adapter, linear)
        adapter.merged()
    assert torch.allclose(model(random_images()), adapted, rtol=1e-3, atol=1e-4)


@each_model
def test_no_module_stands_in_two_places_and_functional_call_leaves_the_model_as_it_was(name):
    model = make(name).eval()
    before = dict(model.named_parameters())
    assert len(list(model.named_modules(remove_duplicate=False))) == len(list(model.modules()))
    expected = model(random_images())
    given = {key: parameter.detach().clone() for key, parameter in before.items()}
    assert torch.equal(functional_call(model, given, (random_images(),)), expected)
    assert all(parameter is before[key] for key, parameter in model.named_parameters())
    assert len({tensor.data_ptr() for tensor in model.state_dict().values()}) == len(model.state_dict())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert torch.equal(twin(random_images()), expected)


def test_a_hook_for_all_modules_sees_all_linears():
    model, seen = make("cait").eval(), set()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.add(m))
    try:
        model(random_images())
    finally:
        handle.remove()
    assert {m for m in model.modules() if isinstance(m, torch.nn.Linear)} <= seen


@pytest.mark.plain
@each_model
def test_a_graph_of_torch_fx_keeps_blocks_and_stages_whole(name):
    from torchvision.models.feature_extraction import create_feature_extractor

    model = make(name).eval()
    images = random_images(2)
    leaves = {"leaf_modules": list(LEAVES)}
    graph = create_feature_extractor(model, {"blocks.0": "first", "head": "logits"}, tracer_kwargs=leaves)
    found = graph(images)
    whole = model.forward_heads(model.forward_features(images))[0]
    assert torch.allclose(found["logits"], whole, atol=1e-6)
    tokens = model.forward_intermediates(images, [0], output_fmt="NLC", return_prefix_tokens=True)[1][0]
    assert torch.equal(found["first"], torch.cat(tokens[::-1], dim=1))


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_what_no_tracer_follows_is_said_in_one_line():
    model = make("plain")
    with pytest.raises(ShapeError, match=r"torch.fx cannot trace .* give its tracer fathoms.parts.LEAVES"):
        torch.fx.symbolic_trace(model)
    with pytest.raises(FathomsError, match=r"TorchScript cannot compile it; use torch.export.export"):
        torch.jit.script(model)


@pytest.mark.parametrize("name", ["plain", "cait", "rope", "seqpool", "vit5"])
@pytest.mark.filterwarnings("ignore")
def test_the_older_onnx_exporter_keeps_the_batch_free(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model = make(name).eval()
    path = str(tmp_path / "m.onnx")
    options = {"dynamo": False, "input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    torch.onnx.export(model, (random_images(2),), path, **options)
    session = onnxruntime.InferenceSession(path)
    for batch in (1, 5):
        images = random_images(batch)
        (found,) = session.run(None, {"x": images.numpy()})
        assert torch.allclose(torch.from_numpy(found), model(images), atol=1e-4)
