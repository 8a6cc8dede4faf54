"""Accelerate: timm's models, faster on the same parameters."""

from __future__ import annotations

import copy
import io

import pytest
import timm
import torch
from torch import nn

from fathoms import FathomsError
from fathoms.ops.attention_ops import why_not_fused
from fathoms.surgery.accelerate import FusedTalkingHeads, OneQueryAttention, accelerate
from fathoms.surgery.fold import fold


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


def test_a_wrong_attention_is_found_out_in_a_cait_that_was_never_trained(monkeypatch):
    """There neither the blocks nor what the class token reads of them weigh more than 1e-5."""
    model = timm.create_model("cait_xxs24_224", img_size=32, depth=2).eval()
    right = FusedTalkingHeads.fast
    monkeypatch.setattr(FusedTalkingHeads, "fast", lambda self, x: -right(self, x))
    report = accelerate(model)
    assert {row[2] for row in report.rows} == {"OneQueryAttention"}
    assert {why for _, why in report.left} == {"it computes something else: its output would move by 2"}


def test_a_faster_module_that_fails_leaves_the_old_one(monkeypatch):
    model = cait()

    def broken(_self, _x):
        raise RuntimeError("no")

    monkeypatch.setattr(OneQueryAttention, "fast", broken)
    report = accelerate(model)
    assert {why for _, why in report.left} == {"the faster module fails in its place (no)"}
    assert {row[2] for row in report.rows} == {"FusedTalkingHeads"}


def renamed(old, change):
    """Another computation under the name and with the parts of a module of timm."""
    kind = type(old)
    old.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, x: change(kind.forward, self, x)})


def test_a_block_that_is_not_timms_stays_and_the_others_are_accelerated():
    model = cait()
    renamed(model.blocks[0].attn, lambda forward, self, x: 2 * forward(self, x))
    renamed(model.blocks_token_only[1].attn, lambda forward, self, x: forward(self, x.flip(1)))
    before = model(images())
    report = accelerate(model)
    assert [name for name, _ in report.left] == ["blocks.0.attn", "blocks_token_only.1.attn"]
    assert all(
        why.startswith("it computes something else: its output would move by") for _, why in report.left
    )
    assert [row[0] for row in report.rows] == ["blocks.1.attn", "blocks_token_only.0.attn"]
    assert torch.allclose(model(images()), before, rtol=1e-4, atol=1e-4)


def test_a_module_that_is_called_with_a_mask_or_not_at_all_stays():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.unused = cait(), cait().blocks[0].attn
            kind = type(self.inner.blocks[0].attn)
            masked = type(
                kind.__name__, (kind,), {"forward": lambda self, x, mask: mask * kind.forward(self, x)}
            )
            self.attn = cait().blocks[0].attn
            self.attn.__class__ = masked

        def forward(self, x):
            return self.inner(x) + self.attn(x.flatten(2)[:, :, :192], 0.5).mean()

    report = accelerate(Masked(), images=images())
    assert len(report) == 4
    assert report.left == (
        ("unused", "it never runs on these images"),
        ("attn", "it is called with 2 inputs, and the faster module takes one"),
    )


def test_what_happens_to_the_parts_afterwards_has_its_effect():
    """A hook, an adapter and dropout of what the faster formulas read, after accelerate."""
    model, seen = cait(), []
    accelerate(model)
    expected = model(images())
    for name in ("blocks.0.attn.proj_l", "blocks_token_only.0.attn.k"):
        model.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(model(images()), expected, rtol=1e-4, atol=1e-4)
    assert len(seen) == 2
    adapted = model.blocks[1].attn.proj_w = Adapted(model.blocks[1].attn.proj_w)
    model(images()).sum().backward()
    assert adapted.extra.grad.any()
    model.blocks[0].attn.attn_drop = nn.Dropout(0.5)
    model.train()
    assert not torch.equal(model(images()), model(images()))


def test_copies_and_saved_models_are_apart_and_stay_accelerated():
    model = cait()
    accelerate(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        attn = twin.blocks[0].attn
        assert torch.equal(twin(images()), model(images()))
        # The module that it replaced came along, with the parameters of the copy.
        assert attn.original.qkv is attn.qkv is not model.blocks[0].attn.qkv
        twin.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
        assert attn.original.qkv.weight is attn.qkv.weight
        assert len(accelerate(twin, images=images())) == 0


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
def test_what_is_compiled_already_is_left_and_a_compiled_model_is_compiled_again():
    model = cait()
    model.blocks[0].attn.compile(backend="eager")
    assert accelerate(model).left == (("blocks.0.attn", "it is compiled already; accelerate first"),)
    model = cait()
    compiled = torch.compile(model, backend="eager")
    expected = compiled(images())
    assert len(accelerate(compiled, images=images())) == 4
    assert torch.allclose(compiled(images()), expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(compiled(images()), expected)


def test_the_model_itself_is_not_reported_as_replaced():
    block = cait().blocks[0]
    report = accelerate(block, images=torch.randn(2, 4, 192))
    assert [row[0] for row in report.rows] == ["attn"]
    report = accelerate(cait().blocks[0].attn, images=torch.randn(2, 4, 192))
    assert "the model itself is this module" in report.table()
    assert len(report) == 0


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


@pytest.mark.parametrize("wrong", [RuntimeError("no"), None])
def test_a_model_that_changes_all_the_same_is_as_it_was(monkeypatch, wrong):
    """As where a module agrees alone, and the model reads what only the old one has."""
    model, right, calls = cait(), FusedTalkingHeads.fast, []
    before = model(images())

    def later(self, x):
        calls.append(1)
        if len(calls) > 2 and wrong:
            raise wrong
        return right(self, x) * (len(calls) < 3)

    monkeypatch.setattr(FusedTalkingHeads, "fast", later)
    with pytest.raises(
        RuntimeError if wrong else FathomsError, match="no" if wrong else "the model is as it was"
    ):
        accelerate(model)
    assert torch.equal(model(images()), before)
    assert not any(isinstance(module, FusedTalkingHeads) for module in model.modules())
