"""Stems, sequence pooling, gates and the late class token: formulas written apart, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.parts import ATTENTIONS, GATES, READOUTS, STEMS, ConvStem, SelfAttention, SequencePool
from fathoms.parts.protocols import Gate, Stem
from fathoms.training.master_weights import ComputeCopy

TINY = {"image_size": 8, "patch_size": 2, "dim": 16, "heads": 2, "depth": 3, "num_classes": 3}
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def vit(**more):
    torch.manual_seed(0)
    return ViT(ViTConfig(**TINY | more))


def same_gradients(ours, theirs, parameters):
    assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-13)
    pairs = (torch.autograd.grad(y.square().sum(), parameters) for y in (ours, theirs))
    for a, b in zip(*pairs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", list(STEMS))
def test_every_stem_gives_one_token_for_each_cell(name):
    stem = STEMS.build(name, 16, 2, 3, "post_pos")
    assert isinstance(stem, Stem)
    assert stem(IMAGES).shape == (4, 16, 16)
    assert stem.after_position(torch.randn(4, 16, 16)).shape == (4, 16, 16)
    with pytest.raises(FathomsError, match="images have 1 channels, the model takes 3"):
        stem(torch.randn(2, 1, 8, 8))


def unfolded(image, weight, stride, padding):
    """A convolution of one image as a matrix product on its windows."""
    rows = F.unfold(image[None], weight.shape[-1], padding=padding, stride=stride)[0]
    side = math.isqrt(rows.shape[1])
    return (weight.flatten(1) @ rows).unflatten(1, (side, side))


def pooled(maps):
    """Maxima of windows of 3 by 3, two apart, of maps that are zero or more."""
    padded = F.pad(maps, (1, 1, 1, 1))
    side = maps.shape[-1] // 2
    cells = [
        padded[:, 2 * r : 2 * r + 3, 2 * c : 2 * c + 3].amax((1, 2)) for r in range(side) for c in range(side)
    ]
    return torch.stack(cells, dim=1).unflatten(1, (side, side))


@pytest.mark.parametrize(("layers", "kernel", "patch"), [(1, 3, 2), (2, 3, 4), (1, 7, 4)])
def test_a_conv_stem_is_convolutions_relu_and_pooling(layers, kernel, patch):
    stem = ConvStem(5, patch, 3, layers=layers, kernel=kernel).double()
    expected = []
    for image in IMAGES.double():
        for conv in stem.convs:
            image = pooled(unfolded(image, conv.weight, stem.stride, kernel // 2).relu())
        expected.append(image.flatten(1).T)
    same_gradients(stem(IMAGES.double()), torch.stack(expected), list(stem.parameters()))


def test_convolutions_start_from_hes_normal_without_a_bias():
    conv = ConvStem(256, 2, 3).convs[0]
    assert conv.bias is None
    assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / 27), rel=0.05)


def test_a_conv_stem_counts_the_multiplications_of_its_convolutions():
    from torch.utils.flop_counter import FlopCounterMode

    stem = ConvStem(16, 4, 3, layers=2)
    with FlopCounterMode(display=False) as counter:
        stem(IMAGES[:1])
    assert stem.flop_count(4) == counter.get_total_flops() // 2


def test_seqpool_is_its_formula_and_leaves_registers_out():
    readout = SequencePool(6).double()
    torch.nn.init.normal_(readout.score.weight)
    tokens = torch.randn(2, 7, 6, dtype=torch.float64)
    rows = []
    for image in tokens:
        scores = torch.exp(image[2:] @ readout.score.weight[0] + readout.score.bias)
        rows.append((scores[:, None] * image[2:]).sum(0, keepdim=True) / scores.sum())
    same_gradients(readout.pool(tokens, 2), torch.stack(rows), [readout.score.weight])


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("cct_2_3x2_32", 0.284),
        ("cct_4_3x2_32", 0.482),
        ("cct_6_3x2_32", 3.327),
        ("cct_6_3x1_32_sine", 3.168),
        ("cct_7_3x2_32", 3.853),
        ("cct_7_3x1_32", 3.760),
        ("cct_14_7x2_224_sine", 22.29),
    ],
)
def test_ccts_have_their_published_size(name, millions):
    with torch.device("meta"):
        model = fathoms.create_model(name, num_classes=10 if name.endswith(("32", "32_sine")) else 1000)
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert parameters == pytest.approx(millions, abs=0.01 if millions > 20 else 0.0006)


def gated(attention, x, gates):
    """Softmax attention with a loop over heads, each channel times its gate."""
    q, k, v = attention.qkv(x).chunk(3, -1)
    width, parts = x.shape[-1] // attention.heads, []
    for head in range(attention.heads):
        own = slice(head * width, (head + 1) * width)
        logits = q[..., own] @ k[..., own].mT / width**0.5
        parts.append(logits.softmax(-1) @ v[..., own])
    opened = 1 / (1 + torch.exp(-(x @ attention.gate.proj.weight.T)))
    opened = opened.repeat_interleave(x.shape[-1] // gates, dim=-1)
    return attention.proj(torch.cat(parts, -1) * opened)


@pytest.mark.parametrize(("gate", "gates"), [("head", 2), ("channel", 8)])
def test_a_gate_is_its_formula(gate, gates):
    torch.manual_seed(0)
    attention = SelfAttention(8, 2, gate=gate).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    assert attention.gate.proj.weight.shape == (gates, 8)
    assert attention.gate.flop_count(5) == 5 * (gates * 8 + 8)
    same_gradients(attention(x), gated(attention, x, gates), [x, *attention.parameters()])


@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.parametrize(
    "attention", [name for name in ATTENTIONS if not ATTENTIONS.metadata(name).reads_context]
)
def test_every_gate_is_on_every_attention_and_starts_half_open(gate, attention):
    model = vit(attn_gate=gate, attention=attention)
    assert isinstance(model.blocks[0].attn.gate, Gate)
    x = torch.ones(1, 5, 16)
    opened = model.blocks[0].attn.gate(x, torch.zeros(1, 5, 16))
    assert torch.allclose(opened, x if gate == "none" else x / 2)


def test_a_gate_on_class_attention_is_refused():
    options = {"heads": 4, "class_attention_depth": 1, "depth": 1, "attn_gate": "head"}
    with pytest.raises(FathomsError, match="attention 'class_attention' takes no gate; leave it out"):
        READOUTS.build("class_attention", 32, queries=1, **options)


NEW = {
    "conv": {"stem": "conv"},
    "seqpool": {"readout": "seqpool", "registers": 4},
    "late": {"class_token_block": 2, "position": "learned_rope", "registers": 4, "distill_token": True},
    "head gate": {"attn_gate": "head", "norm": "rmsnorm"},
    "channel gate": {"attn_gate": "channel", "attention": "talking_heads", "residual": "fixup"},
    "keel": {"attn_placement": "keel", "mlp_placement": "keel", "residual": "layerscale"},
    "mix-ln": {"placement_by_depth": "0:post", "norm": "dyt"},
    "orthogonal": {"residual": "orthogonal"},
    "mv_split": {"residual": "mv_split", "registers": 1},
    "completep": {"residual": "completep", "base_depth": 1, "base_dim": 8},
}


@pytest.mark.parametrize("name", list(NEW))
def test_folding_keeps_the_function(name):
    """Of mv_split's and orthogonal's branches nothing can be moved past the sum: norms fold, the rules stay."""
    model = vit(**NEW[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    folded, report = fathoms.fold(model, images=IMAGES)
    assert report.difference <= 1e-5
    assert torch.allclose(folded(IMAGES), model.eval()(IMAGES), atol=1e-4)


@pytest.mark.parametrize("name", list(NEW))
def test_the_working_copy_computes_what_the_model_does(name):
    model = vit(**NEW[name])
    copies = ComputeCopy(model, torch.float32)
    ours, theirs = model(IMAGES), copies.module(IMAGES)
    assert torch.allclose(ours, theirs, atol=1e-5)
    ours.square().sum().backward()
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    theirs.square().sum().backward()
    copies.pull_gradients()
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[key], rtol=1e-3, atol=1e-5), key


@pytest.mark.parametrize("name", list(NEW))
def test_features_intermediates_checkpointing_and_layer_decay_work(name):
    model = vit(**NEW[name])
    logits = model(IMAGES)
    assert torch.allclose(model.forward_head(model.forward_features(IMAGES)), logits, atol=1e-6)
    maps = model.forward_intermediates(IMAGES, intermediates_only=True)
    assert {tuple(each.shape) for each in maps} == {(4, 16, 4, 4)}
    model.set_grad_checkpointing()
    assert torch.allclose(model(IMAGES), logits, atol=1e-6)
    groups = fathoms.param_groups(model, 0.1, layer_decay=0.5)
    assert sum(len(group["names"]) for group in groups) == len(list(model.parameters()))
    model.set_image_size(12)
    assert model(torch.randn(2, 3, 12, 12)).shape == (2, 3)


@pytest.mark.compile
@pytest.mark.parametrize("name", list(NEW))
def test_the_compiler_takes_the_whole_model_without_a_break(name):
    model = vit(**NEW[name])
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.allclose(compiled(IMAGES), model(IMAGES), atol=1e-5)


@pytest.mark.parametrize("name", list(NEW))
def test_weights_save_and_load(name, tmp_path):
    model, twin = vit(**NEW[name]), vit(**NEW[name], num_classes=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    fathoms.save_weights(model, tmp_path / "w.safetensors")
    fathoms.load_weights(twin, tmp_path / "w.safetensors")
    assert torch.equal(model(IMAGES), twin(IMAGES))
    if name != "completep":
        with pytest.raises(FathomsError, match="has no place in timm's layout"):
            fathoms.save_weights(model, tmp_path / "t.safetensors", layout="timm")


def test_a_late_class_token_is_not_seen_by_the_blocks_before_it():
    late, early = vit(class_token_block=2), vit()
    # A class token that joins late has no position.
    late.load_state_dict(
        {key: value for key, value in early.state_dict().items() if key != "readout.positions"}
    )
    assert not torch.allclose(late(IMAGES), early(IMAGES))
    x = early.position(early.stem(IMAGES))
    for block in early.blocks[:2]:
        x = block(x)
    x = torch.cat([early.readout.queries.expand(4, 1, -1), x], dim=1)
    x = early.blocks[2](x)
    assert torch.allclose(late(IMAGES), early.head(early.norm(x)[:, 0]), atol=1e-6)
    assert early.flop_count() > late.flop_count()


def test_layer_decay_puts_a_late_class_token_where_it_joins():
    groups = fathoms.param_groups(vit(class_token_block=2), 0.0, layer_decay=0.5)
    scales = {name: group["lr_scale"] for group in groups for name in group["names"]}
    assert scales["readout.queries"] == scales["blocks.1.mlp.fc1.weight"] == 0.25


@pytest.mark.parametrize("name", ["late", "head gate", "channel gate", "seqpool"])
def test_a_model_with_penalties_gives_the_same_logits(name):
    from fathoms.training.penalties import WithPenalties

    model = vit(**NEW[name])
    heads, penalty = WithPenalties(model, 0.1, 0.03, attn_layers=3)(IMAGES)
    assert torch.allclose(sum(heads) / len(heads), model(IMAGES), atol=1e-5)
    assert penalty > 0


@pytest.mark.parametrize("name", list(NEW))
def test_attention_maps_and_the_probe_work(name):
    from fathoms.probes.attention_maps import attention_maps

    maps = attention_maps(vit(**NEW[name]), IMAGES)
    assert torch.allclose(maps.sum((1, 2)), torch.ones(4), atol=1e-5)
    signal = fathoms.probe(vit(**NEW[name]), IMAGES)
    assert all(math.isfinite(site.stream) for site in signal)
