"""Accelerate: timm's models, faster on the same parameters."""

from __future__ import annotations

import copy
import importlib

import pytest
import timm
import torch
from timm.layers import Mlp
from torch import nn

from fathoms import FathomsError
from fathoms.models.vit import ViT
from fathoms.models.zoo import model_config
from fathoms.ops.talking_heads import why_not_fused
from fathoms.parts.mlp import GeluMLP
from fathoms.surgery.accelerate.accelerate import accelerate, fuse_mlps
from fathoms.surgery.accelerate.modules import FusedTalkingHeads, OneQueryAttention
from fathoms.surgery.fold.fold import fold
from fathoms.surgery.fold.graph import operation, trace


def cait(**options):
    return moved("cait_xxs24_224", img_size=32, **options)


def images(batch=3):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def moved(name, depth=2, **options):
    torch.manual_seed(0)
    model = timm.create_model(name, depth=depth, num_classes=5, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def assert_trains_alike(model, plain, x):
    """The same loss gives the same gradients, dropped paths included; in float64, where a zero is one."""
    for each in (model, plain):
        each.double().train()
        torch.manual_seed(5)
        each(x.double()).square().sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        largest = theirs[name].grad.abs().max().clamp_min(1e-3)
        assert (parameter.grad - theirs[name].grad).abs().max() < 1e-9 * largest, name


def test_same_outputs_gradients_and_names():
    model = cait(drop_path_rate=0.3)
    plain = copy.deepcopy(model)
    report = accelerate(model)
    assert [row[1:] for row in report.rows] == [
        ("TalkingHeadAttn", "FusedTalkingHeads"),
        ("TalkingHeadAttn", "FusedTalkingHeads"),
        ("ClassAttn", "OneQueryAttention"),
        ("ClassAttn", "OneQueryAttention"),
    ]
    assert report.difference < 1e-5
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    assert_trains_alike(model, plain, images())
    assert "FusedTalkingHeads" in report.table()
    assert report.to_json()["left"] == ()


@pytest.fixture
def kernel_pays(monkeypatch):
    """As on a device where the kernel of an MLP is faster."""
    # The package has a function of the module's name.
    module = importlib.import_module("fathoms.surgery.accelerate.accelerate")
    monkeypatch.setattr(module, "why_not_here", lambda _: None)


MLPS = {"fathoms": lambda: GeluMLP(8), "timm": lambda: Mlp(8, 16, drop=0.1)}


@pytest.mark.usefixtures("kernel_pays")
@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_is_replaced_with_the_same_output_gradients_and_names(name):
    """Where the kernel itself does not run, as on a CPU, the old forward does: equal to the bit."""
    old = MLPS[name]()
    model = nn.Sequential(copy.deepcopy(old))
    state = list(model.state_dict())
    report = accelerate(model, images=torch.randn(2, 5, 8))
    assert [row[1:] for row in report.rows] == [(type(old).__name__, "FusedMLP")]
    assert list(model.state_dict()) == state
    x = torch.randn(3, 5, 8)
    for mode in (False, True):
        outputs = []
        for each in (old, model[0]):
            torch.manual_seed(2)
            outputs.append(each.train(mode)(x))
        assert torch.equal(*outputs)
    outputs[1].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch.equal(copy.deepcopy(model).eval()(x), model.eval()(x))


@pytest.mark.usefixtures("kernel_pays")
def test_a_vit_with_fused_mlps_still_counts_and_copies():
    model = ViT(model_config("vit_digits"))
    count = model.flop_count()
    assert fuse_mlps(model) == len(model.blocks)
    assert model.flop_count() == count
    assert fuse_mlps(model) == 0


@pytest.mark.usefixtures("kernel_pays")
def test_folding_sees_the_linears_of_a_fused_mlp(monkeypatch):
    """As on a device where the kernel runs, which reads the weights itself."""
    config = model_config("vit_digits", residual="layerscale")
    model = ViT(config).eval()
    assert fuse_mlps(model) == len(model.blocks)
    monkeypatch.setattr("fathoms.surgery.accelerate.modules.why_not_fused", lambda *_: None)
    traced = trace(model, torch.randn(2, config.in_channels, config.image_size, config.image_size))
    for name in ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"):
        assert [operation(node) for node in traced.readers(name)] == ["linear"]


@pytest.mark.usefixtures("kernel_pays")
@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: mlp.act.register_forward_hook(print),
        lambda mlp: setattr(mlp, "act", nn.ReLU()),
        lambda mlp: setattr(mlp, "act", nn.GELU("tanh")),
        lambda mlp: setattr(mlp, "norm", nn.LayerNorm(32)),
        lambda mlp: setattr(mlp.fc1, "forward", lambda x: torch.zeros(*x.shape[:-1], 32)),
        lambda mlp: setattr(mlp, "fc2", nn.Linear(32, 9)),
    ],
)
def test_an_mlp_that_does_more_is_not_replaced(change):
    model = nn.Sequential(GeluMLP(8))
    change(model[0])
    assert fuse_mlps(model) == 0


def test_an_mlp_is_not_replaced_where_its_kernel_cannot_run():
    assert fuse_mlps(nn.Sequential(GeluMLP(8))) == 0


def test_a_wrong_attention_is_found_out_in_a_cait_that_was_never_trained(monkeypatch):
    """There neither the blocks nor what the class token reads of them weigh more than 1e-5."""
    model = timm.create_model("cait_xxs24_224", img_size=32, depth=2).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert accelerate(copy.deepcopy(model)).difference > 0
    right = FusedTalkingHeads.forward
    monkeypatch.setattr(FusedTalkingHeads, "forward", lambda self, x: -right(self, x))
    with pytest.raises(FathomsError, match="the model is as it was"):
        accelerate(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_an_error_on_the_way_leaves_the_model_as_it_was(monkeypatch):
    model = cait()
    before = model(images())

    def broken(_self, _x):
        raise RuntimeError("no")

    monkeypatch.setattr(OneQueryAttention, "forward", broken)
    with pytest.raises(RuntimeError, match="no"):
        accelerate(model)
    assert torch.equal(model(images()), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_talking_heads_run_fused_with_the_same_outputs_and_gradients(dtype):
    """In bfloat16 both are held to timm's own model in float32: neither may be worse than the other by far."""
    model = cait().cuda()
    exact, plain = copy.deepcopy(model), copy.deepcopy(model).to(dtype)
    model = model.to(dtype)
    report = accelerate(model)
    attn = next(module for module in model.modules() if isinstance(module, FusedTalkingHeads))
    assert why_not_fused(torch.empty(2, attn.num_heads, 5, 48, device="cuda", dtype=dtype)) is None
    assert report.difference < (1e-4 if dtype == torch.float32 else 5e-2)
    x = images().cuda()
    for each in (exact, plain, model):
        each(x.to(next(each.parameters()).dtype)).float().square().sum().backward()
    theirs, reference = dict(plain.named_parameters()), dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        truth = reference[name].grad
        if name.endswith(("proj_l.bias", "k.bias")):
            continue  # It cancels in the softmax, so its gradient is zero: what is there is rounding.
        own = (parameter.grad.float() - truth).norm() / truth.norm()
        other = (theirs[name].grad.float() - truth).norm() / truth.norm()
        assert own < 2 * other + (1e-3 if dtype == torch.float32 else 2e-2), name


class Adapted(nn.Linear):
    """A linear with a part of its own that starts at zero, as adapters do."""

    def __init__(self, old):
        super().__init__(old.in_features, old.out_features, old.bias is not None)
        self.weight, self.bias = old.weight, old.bias
        self.extra = nn.Parameter(torch.zeros(old.out_features, old.in_features))

    def forward(self, x):
        return super().forward(x) + x @ self.extra.T


def test_a_module_with_a_forward_of_its_own_is_left():
    model = cait()
    model.blocks[1].attn.forward = model.blocks[1].attn.forward
    assert accelerate(model).left == (("blocks.1.attn", "something has given it a forward of its own"),)


def test_what_a_new_module_would_pass_over_is_left():
    model = cait(depth=3)
    heads, reader = model.blocks[0].attn, model.blocks_token_only[0].attn
    heads.attn_drop.register_forward_hook(lambda *_: None)
    reader.v = Adapted(reader.v)
    model.blocks[1].attn.register_load_state_dict_pre_hook(lambda *_: None)
    model.blocks_token_only[1].attn.attn_drop = nn.AlphaDropout(0.1)
    report = accelerate(model)
    assert report.left == (
        ("blocks.0.attn", "attn_drop has hooks, which would not be called"),
        ("blocks.1.attn", "it has hooks of load_state_dict, which know it alone"),
        ("blocks_token_only.0.attn", "v is more than a plain linear or has hooks"),
        (
            "blocks_token_only.1.attn",
            "its attn_drop is of type AlphaDropout, which only its own forward calls",
        ),
    )
    assert model.blocks[0].attn is heads
    model(images()).sum().backward()
    assert reader.v.extra.grad.any()


@pytest.mark.compile
def test_what_is_compiled_already_is_left():
    model = cait()
    model.blocks[0].attn.compile(backend="eager")
    assert accelerate(model).left == (("blocks.0.attn", "it is compiled already; accelerate first"),)


def test_the_model_itself_is_not_reported_as_replaced():
    block = cait().blocks[0]
    report = accelerate(block, images=torch.randn(2, 4, 192))
    assert [row[0] for row in report.rows] == ["attn"]


def test_hooks_flags_and_modes_come_along():
    model, seen = cait().train(), []
    model.blocks[0].norm1.eval()
    modes = [part.training for part in model.modules()]
    for part in (model.blocks[0].attn, model.blocks_token_only[0].attn):
        part.register_forward_hook(lambda *_: seen.append(1))
        part.flag = "kept"
    accelerate(model)
    assert [part.training for part in model.modules()] == modes
    seen.clear()
    model(images())
    assert len(seen) == 2
    assert model.blocks[0].attn.flag == model.blocks_token_only[0].attn.flag == "kept"


def test_dropout_of_attention_is_left_to_the_original():
    model = cait(attn_drop_rate=0.1)
    report = accelerate(model)
    assert {row[2] for row in report.rows} == {"OneQueryAttention"}
    assert [reason for _, reason in report.left] == [
        "it drops attention with probability 0.1, which no kernel does"
    ] * 2


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_class_attention_in_bfloat16_errs_no_more_than_the_original(size):
    """At most 1.2 times as far from float64, output and gradients; the key bias has no gradient but zero."""
    torch.manual_seed(0)
    old = cait().blocks_token_only[0].attn.bfloat16()
    with torch.no_grad():
        old.q.weight *= size
    x = (torch.randn(4, 1, 192) + torch.randn(4, 65, 192)).bfloat16()
    grad = torch.randn(4, 1, 192).bfloat16()

    def outcome(module, dtype=torch.bfloat16):
        given = [x.detach().to(dtype).requires_grad_()]
        given += [p for name, p in module.named_parameters() if name != "k.bias"]
        out = module(given[0])
        return [out.detach(), *torch.autograd.grad(out, given, grad.to(dtype))]

    exact = outcome(copy.deepcopy(old).double(), torch.float64)
    for own, plain, truth in zip(outcome(OneQueryAttention(old)), outcome(old), exact, strict=True):
        assert (own - truth).norm() <= 1.2 * (plain - truth).norm()


@pytest.mark.parametrize("biases", [False, True])
def test_class_attention_with_and_without_biases_and_with_dropped_probabilities(biases):
    """Dropout is the same function of the same probabilities, so with one seed both drop alike."""
    model = cait(qkv_bias=biases, attn_drop_rate=0.5)
    old = model.blocks_token_only[0].attn
    old.fused_attn = False
    new = OneQueryAttention(old).train()
    old.train()
    x = torch.randn(2, 7, 192)
    torch.manual_seed(3)
    expected = old(x)
    torch.manual_seed(3)
    # The maps have one axis more in the original; the numbers drawn for them come in the same order.
    assert torch.allclose(new(x), expected, rtol=1e-4, atol=1e-4)
    new(x).sum().backward()
    assert all(parameter.grad is not None for parameter in new.parameters())
    assert torch.allclose(new.eval()(x), old.eval()(x), rtol=1e-4, atol=1e-4)


def test_an_accelerated_model_folds_and_copies():
    model = cait()
    accelerate(model)
    folded, report = fold(model)
    assert report.difference < 1e-5
    assert report.left == ()
    assert torch.equal(copy.deepcopy(folded)(images()), folded(images()))
    assert any(isinstance(module, FusedTalkingHeads) for module in folded.modules())


def test_bfloat16_stays_bfloat16():
    model = cait().bfloat16()
    accelerate(model)
    assert model(images().bfloat16()).dtype == torch.bfloat16


def test_a_model_with_nothing_to_replace_gets_a_report_without_rows():
    model = cait()
    accelerate(model)
    for plain in (nn.Linear(3, 3), moved("deit3_small_patch16_224", img_size=32), model):
        report = accelerate(plain)
        assert (len(report), report.left, report.difference) == (0, (), 0.0)
        assert report.table().startswith(f"{type(plain).__name__} gains nothing: it has no talking heads")


def test_a_model_whose_parts_must_stay_gets_the_reasons():
    model = cait()
    for name, module in model.named_modules():
        if name.endswith(("attn", "mlp")):
            module.forward = module.forward
    report = accelerate(model)
    assert len(report) == 0
    assert report.left
    assert "is as it was, for these reasons" in report.table()


def test_a_wrong_replacement_is_undone(monkeypatch):
    model = cait()
    before = model(images())
    monkeypatch.setattr(FusedTalkingHeads, "forward", lambda _, x: x)
    with pytest.raises(FathomsError, match="the model is as it was"):
        accelerate(model)
    assert torch.equal(model(images()), before)
