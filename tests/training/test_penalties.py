"""Penalties: feature decay and attention sharpening against plain loops in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.parts import attention as attention_module
from fathoms.training.penalties import (
    WithPenalties,
    attend_with_maxima,
    attention_penalty,
    effective_weights,
    feature_penalty,
)
from fathoms.training.recipe import Recipe
from tiny_models import VARIANTS

SMALL = {"image_size": 16, "patch_size": 4, "dim": 16, "heads": 2, "depth": 3, "num_classes": 5}
STRENGTHS = {"both": (0.1, 0.03, 2), "features": (0.2, 0.0, 0), "attention": (0.0, 0.05, 9)}


# How far q·k is scaled up, for flat and sharp attention rows in the same model. CaiT's mixers start small.
SHARPNESS = {"plain": 20.0, "cait": 3000.0, "vit5": 3.0}


def built(variant):
    """A model with some features beyond 200, and with sharp and flat attention rows."""
    torch.manual_seed(0)
    vit = ViT(ViTConfig(**SMALL, **VARIANTS[variant]))
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        # Two channels of the stream start next to the limit, and the branches push them about. The branches
        # do not read them, or nothing else would count there.
        vit.position.table[:, 3].add_(199.5)
        vit.position.table[:, 7].sub_(199.5)
        for block in vit.blocks:
            block.attn.qkv.weight[:, [3, 7]] = 0.0
            block.mlp.fc1.weight[:, [3, 7]] = 0.0
            block.attn.qkv.weight[:32].mul_(SHARPNESS.get(variant, 1.0) ** 0.5)
            if variant == "vit5":
                block.attn.q_norm.weight.mul_(SHARPNESS[variant])
            if variant == "deepnorm":
                block.attn_join.norm.bias[3] = 201.0
    return vit


def images(dtype=torch.float64):
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def slow_feature_penalty(stream):
    """LearnableScaler's feature penalty, one element at a time."""
    beyond = [value.abs() - 200 for value in stream.flatten() if abs(value.item()) > 200]
    if not beyond:
        return stream.new_zeros(())
    return sum(beyond) / len(beyond) + max(beyond, key=torch.Tensor.item)


def slow_maxima(attn, x, rotation):
    """The largest probability of each row, one row at a time."""
    heads, width = attn.heads, attn.dim // attn.heads
    q, k, _ = attn.project(x, rotation)
    maxima = []
    for image in range(x.shape[0]):
        logits = [q[image, head] @ k[image, head].T / math.sqrt(width) for head in range(heads)]
        if hasattr(attn, "proj_l"):
            weight, bias = attn.proj_l.weight, attn.proj_l.bias
            logits = [sum(weight[g, h] * logits[h] for h in range(heads)) + bias[g] for g in range(heads)]
        for head in range(heads):
            for row in logits[head]:
                exponentials = (row - row.max().detach()).exp()
                maxima.append((exponentials / exponentials.sum()).max())
    return maxima


def slow_attention_penalty(maxima):
    flat = [value for value in maxima if value.item() < 0.5]
    return 1 - sum(flat) / len(flat) if flat else 0.0


def slow_forward(vit, images, feature_decay, attn_loss, attn_layers):
    """The untouched model with hooks, and both penalties from what the hooks saw."""
    seen = {"stream": [], "attention": []}
    hooks = []
    for block in vit.blocks:
        hooks += [
            block.attn.register_forward_hook(lambda attn, given, _: seen["attention"].append((attn, *given))),
            block.attn_join.register_forward_hook(
                lambda *call: seen["stream"].extend(call[2:] if call[1][1:] else ())
            ),
            block.mlp_join.register_forward_hook(
                lambda *call: seen["stream"].extend(call[2:] if call[1][1:] else ())
            ),
        ]
    heads = vit.forward_heads(vit.forward_features(images))
    for hook in hooks:
        hook.remove()
    features = sum(slow_feature_penalty(stream) for stream in seen["stream"])
    maxima = [slow_maxima(*call) for call in seen["attention"][:attn_layers]]
    sharpening = sum(slow_attention_penalty(rows) for rows in maxima)
    scale = feature_decay if feature_decay else 1.0
    penalty = feature_decay**2 * features + attn_loss * scale * sharpening
    return heads, penalty, seen["stream"], maxima


@pytest.fixture(params=list(VARIANTS))
def variant(request):
    return request.param


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("strength", list(STRENGTHS))
def test_heads_penalty_and_gradients_are_those_of_plain_loops(variant, strength, recompute):
    """Relative 1e-9 in float64; key biases and `proj_l`'s bias cancel, so their gradients are rounding."""
    vit, twin = built(variant).double(), built(variant).double()
    vit.set_grad_checkpointing(recompute)
    heads, penalty = WithPenalties(vit, *STRENGTHS[strength])(images())
    expected_heads, expected, stream, maxima = slow_forward(twin, images(), *STRENGTHS[strength])

    assert any((each.abs() > 200).any() for each in stream), "the test must see features beyond the limit"
    assert any((each.abs() <= 200).any() for each in stream)
    rows = [value.item() < 0.5 for block in maxima for value in block]
    assert strength == "features" or (any(rows) and not all(rows)), "it must see flat and sharp rows"
    assert len(heads) == len(expected_heads)
    for ours, theirs in zip(heads, expected_heads, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    assert penalty.item() == pytest.approx(expected.item(), rel=1e-9)
    assert penalty > 0

    (sum(head.square().sum() for head in heads) + penalty).backward()
    (sum(head.square().sum() for head in expected_heads) + expected).backward()
    for (name, a), b in zip(vit.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-7, atol=1e-9 * (1 + float(b.grad.abs().max()))), name


def test_the_penalty_alone_has_a_gradient(variant):
    vit = built(variant).double()
    _, penalty = WithPenalties(vit, *STRENGTHS["both"])(images())
    penalty.backward()
    assert vit.stem.proj.weight.grad.abs().sum() > 0
    assert vit.head.weight.grad is None


@pytest.mark.parametrize("values", [[0.0], [200.0, -200.0], [1e-3, 200.1, -350.0, 201.0, 350.0]])
def test_feature_penalty_by_hand(values):
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    ours, theirs = feature_penalty(x), slow_feature_penalty(twin)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    ours.backward()
    if theirs.requires_grad:
        theirs.backward()
        # A tie of two maxima may share the gradient or give it to one: the sum is the same.
        assert x.grad.abs().sum().item() == pytest.approx(twin.grad.abs().sum().item())
    else:
        assert not x.grad.any()


@pytest.mark.parametrize(("maxima", "value"), [([0.5, 0.9], 0.0), ([0.1, 0.3, 0.7], 0.8), ([0.2], 0.8)])
def test_attention_penalty_by_hand(maxima, value):
    x = torch.tensor([[maxima]], dtype=torch.float64, requires_grad=True)
    penalty = attention_penalty(x)
    assert penalty.item() == pytest.approx(value)
    penalty.backward()
    flat = [each < 0.5 for each in maxima]
    assert x.grad.flatten().tolist() == pytest.approx([-each / max(sum(flat), 1) for each in flat])


def test_weights_are_the_originals_and_attention_can_stand_alone():
    assert effective_weights(0.1, 0.03) == pytest.approx((0.01, 0.003))
    assert effective_weights(0.1, 0.0) == pytest.approx((0.01, 0.0))
    assert effective_weights(0.0, 0.03) == (0.0, 0.03)


@pytest.mark.parametrize("name", ["plain", "cait", "vit5"])
def test_only_the_first_blocks_leave_the_fused_attention(name, monkeypatch):
    vit = built(name).float()
    calls = []
    place, function = (attention_module, "talking_heads") if name == "cait" else (nn.functional, None)
    function = function or "scaled_dot_product_attention"
    fused = getattr(place, function)
    monkeypatch.setattr(place, function, lambda *a, **k: (calls.append(1), fused(*a, **k))[1])
    for layers, expected in ((0, 3), (1, 2), (3, 0)):
        calls.clear()
        WithPenalties(vit, 0.1, 0.03 if layers else 0.0, layers)(images(torch.float32))
        assert len(calls) == expected


def test_without_penalties_the_model_is_the_model(variant):
    vit = built(variant).float()
    heads, penalty = WithPenalties(vit)(images(torch.float32))
    plain = vit.forward_heads(vit.forward_features(images(torch.float32)))
    assert all(torch.equal(a, b) for a, b in zip(heads, plain, strict=True))
    assert penalty.item() == 0.0
    assert penalty.dtype == torch.float32
    assert not penalty.requires_grad


def test_bfloat16_autocast_gives_a_float32_penalty_nearby(variant):
    """bfloat16 steps by 1 at 200, so the excess over the limit is coarse; flat rows are as exact as usual."""
    vit = built(variant).float()
    for strength, tolerance in (("features", 0.5), ("attention", 0.1)):
        model = WithPenalties(vit, *STRENGTHS[strength])
        _, exact = model(images(torch.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            heads, penalty = model(images(torch.float32))
        assert penalty.dtype == torch.float32
        assert penalty.item() == pytest.approx(exact.item(), rel=tolerance)
        (heads[0].float().square().sum() + penalty).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in vit.parameters())


def test_drop_path_is_recomputed_with_the_same_draws():
    vit = ViT(ViTConfig(**SMALL, drop_path=0.5)).double()
    twin = copy.deepcopy(vit)
    twin.set_grad_checkpointing()
    for model in (vit, twin):
        torch.manual_seed(3)
        heads, penalty = WithPenalties(model, 0.1, 0.5, 2)(images())
        (heads[0].square().sum() + penalty).backward()
    for a, b in zip(vit.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-10)


def test_attention_with_maxima_is_the_attention(variant):
    vit = built(variant).double()
    tokens = vit.embed(images())
    rotation = None if vit.rope is None else vit.rope()
    attn = vit.blocks[0].attn
    out, maxima = attend_with_maxima(attn, tokens / 100, rotation)
    assert torch.allclose(out, attn(tokens / 100, rotation), rtol=1e-9, atol=1e-9)
    assert maxima.shape == (2, 2, tokens.shape[1])


def test_it_runs_inside_ddp():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        vit = built("cait").float()
        twin = copy.deepcopy(vit)
        model = nn.parallel.DistributedDataParallel(WithPenalties(vit, *STRENGTHS["both"]))
        for each in (model, WithPenalties(twin, *STRENGTHS["both"])):
            heads, penalty = each(images(torch.float32))
            (heads[0].square().sum() + penalty).backward()
        for a, b in zip(vit.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.compile
@pytest.mark.parametrize(("name", "recompute"), [("cait", True), ("vit5", False)])
def test_it_compiles_in_one_graph_forward_and_backward(name, recompute):
    vit, twin = built(name).float(), built(name).float()
    twin.set_grad_checkpointing(recompute)
    model, compiled = WithPenalties(vit, 0.1, 0.5, 2), WithPenalties(twin, 0.1, 0.5, 2)
    compiled = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    results = [each(images(torch.float32)) for each in (model, compiled)]
    for heads, penalty in results:
        (heads[0].square().sum() + penalty).backward()
    assert torch.allclose(results[0][0][0], results[1][0][0], rtol=1e-4, atol=1e-4)
    assert results[0][1].item() == pytest.approx(results[1][1].item(), rel=1e-3)
    for (key, a), b in zip(vit.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-2, atol=1e-3 * (1 + float(a.grad.abs().max()))), key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_feature_decay": -0.1}, "--train-feature-decay -0.1: use 0 or more"),
        ({"attn_extra_loss": -0.1}, "--attn-extra-loss -0.1: use 0 or more"),
        ({"attn_extra_loss": 0.1}, "--attn-extra-loss applies to no block"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(FathomsError, match=message) as caught:
        Recipe(**options)
    assert "\n" not in str(caught.value)
