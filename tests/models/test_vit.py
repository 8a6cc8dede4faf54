"""The model's habits: those of timm's models, and those of torch's tools."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.parts import NORMS, RESIDUALS, Block
from tiny_models import VARIANTS

SMALL = {"image_size": 32, "patch_size": 8, "dim": 48, "heads": 4, "depth": 3, "num_classes": 10}


POST = {"deepnorm": {"attn_placement": "post", "mlp_placement": "post"}}


def fresh(variant, **more):
    torch.manual_seed(0)
    return ViT(ViTConfig(**SMALL, **VARIANTS[variant] | more))


def built(variant, **more):
    """A model moved off its start, where zeros would hide whole branches."""
    vit = fresh(variant, **more)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return vit


def images(batch=2):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=list(VARIANTS))
def variant(request):
    return request.param


def test_features_then_head_is_the_whole(variant):
    vit = built(variant).eval()
    tokens = vit.forward_features(images())
    assert tokens.shape[2] == vit.num_features == 48
    assert torch.equal(vit.forward_head(tokens), vit(images()))
    assert vit.forward_head(tokens, pre_logits=True).shape == (2, 48)
    assert len(vit.forward_heads(tokens)) == (2 if variant == "distilled" else 1)


def test_intermediates_come_as_maps_or_sequences(variant):
    vit = built(variant).eval()
    final, maps = vit.forward_intermediates(images())
    assert torch.equal(final, vit.forward_features(images()))
    assert [tuple(m.shape) for m in maps] == [(2, 48, 4, 4)] * 3
    (sequence,) = vit.forward_intermediates(images(), [-1], output_fmt="NLC", intermediates_only=True)
    assert torch.equal(sequence.transpose(1, 2).unflatten(2, (4, 4)), maps[-1])
    ((_, prefix),) = vit.forward_intermediates(
        images(), 1, return_prefix_tokens=True, intermediates_only=True
    )
    assert prefix.shape[1] == vit.num_prefix_tokens
    with pytest.raises(FathomsError, match="leave the blocks 0-2"):
        vit.forward_intermediates(images(), [3])


def test_reset_classifier_changes_the_outputs_and_the_config(variant):
    vit = built(variant)
    vit.reset_classifier(7)
    assert vit(images()).shape == (2, 7)
    assert vit.num_classes == vit.config.num_classes == 7
    vit.reset_classifier(0)
    assert vit(images()).shape == (2, 48)


def test_gradient_checkpointing_changes_nothing_but_memory(variant):
    vit, twin = built(variant), built(variant)
    twin.set_grad_checkpointing()
    for model in (vit, twin):
        model(images()).square().sum().backward()
    for (name, a), b in zip(vit.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7), name


def test_a_meta_model_starts_as_a_real_one_does(variant):
    with torch.device("meta"):
        vit = ViT(ViTConfig(**SMALL, **VARIANTS[variant]))
    assert all(parameter.is_meta for parameter in vit.parameters())
    vit = vit.to_empty(device="cpu")
    torch.manual_seed(7)
    vit.reset_parameters()
    twin = built(variant)
    torch.manual_seed(7)
    twin.reset_parameters()
    for (name, a), b in zip(vit.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(vit(images()), twin(images()))


def test_bfloat16_and_autocast_stay_near_float32(variant):
    """Two percent of the largest logit: bfloat16 keeps 8 bits, through 3 blocks."""
    vit = built(variant).eval()
    exact = vit(images())
    tolerance = 0.02 * exact.abs().max() + 1e-6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (vit(images()).float() - exact).abs().max() < tolerance
    half = copy.deepcopy(vit).bfloat16()(images().bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).abs().max() < 2 * tolerance


def test_deepcopy_is_another_model_with_the_same_answer(variant):
    vit = built(variant).eval()
    twin = copy.deepcopy(vit)
    assert torch.equal(vit(images()), twin(images()))
    with torch.no_grad():
        twin.stem.proj.weight.add_(1.0)
    assert not torch.equal(vit(images()), twin(images()))


def test_a_pickled_model_gives_the_same_answer(variant):
    """As torch.save of a whole model and processes that are spawned need."""
    vit = built(variant).eval()
    assert torch.equal(pickle.loads(pickle.dumps(vit))(images()), vit(images()))


@pytest.mark.parametrize("residual", list(RESIDUALS))
def test_a_block_of_every_residual_method_can_be_pickled(residual):
    norm = "none" if residual == "fixup" else "layernorm"
    block = Block(16, 2, residual=residual, norm=norm, **POST.get(residual, {}))
    assert set(pickle.loads(pickle.dumps(block)).state_dict()) == set(block.state_dict())


@pytest.mark.plain
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 32, 32), r"images have the shape \(3, 32, 32\); give a batch \(B, 3, 32, 32\)"),
        ((2, 32, 32, 3), r"images have their 3 channels last; give \(B, 3, 32, 32\)"),
        ((2, 3, 48, 48), "images are 48x48, the model takes 32x32; resize them or build"),
        ((2, 1, 32, 32), "images have 1 channels, the model takes 3"),
    ],
)
def test_images_of_another_shape_are_refused_with_what_is_wrong(shape, words):
    with pytest.raises(FathomsError, match=words):
        fresh("plain")(torch.zeros(shape))


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiles_in_one_graph_forward_and_backward(variant, backend):
    """Machine code takes a minute or more for each variant; one of several parts is in test_parts_everywhere.py."""
    vit, twin = built(variant), built(variant)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    for model in (vit, compiled):
        model(images()).square().sum().backward()
    assert torch.allclose(vit(images()), compiled(images()), atol=1e-5)
    for (name, a), b in zip(vit.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5), name


@pytest.mark.compile
def test_exports_with_a_dynamic_batch(variant):
    vit = built(variant).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(vit, (images(3),), dynamic_shapes=({0: batch},))
    assert torch.allclose(program.module()(images(5)), vit(images(5)), atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_drop_path_drops_in_training_only(rate):
    vit = built("plain", drop_path=rate)
    assert torch.equal(vit.eval()(images()), vit(images()))
    torch.manual_seed(0)
    first = vit.train()(images())
    assert torch.equal(first, vit(images())) is (rate == 0.0)


def test_drop_path_keeps_the_mean():
    from fathoms.parts import DropPath

    drop = DropPath(0.3).train()
    y = drop(torch.ones(20_000, 3, 2))
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert y.mean() == pytest.approx(1.0, abs=0.02)
    assert torch.equal(y[:, 0, 0], y[:, 2, 1])


def test_zero_scales_leave_the_stream_alone():
    vit = fresh("plain", residual="layerscale", residual_init=0.0).eval()
    tokens = vit.embed(images())
    final, maps = vit.forward_intermediates(images(), output_fmt="NLC")
    assert torch.equal(maps[-1], tokens[:, 1:])
    assert vit.blocks[0].attn_join.scale.gamma.shape == (48,)
    assert final.shape == tokens.shape


def test_cait_gives_no_position_to_the_class_token_and_freezes_the_patches():
    vit = built("cait").eval()
    tokens = vit.forward_features(images())
    _, maps = vit.forward_intermediates(images(), 1, norm=True, output_fmt="NLC")
    assert torch.allclose(tokens[:, 1:], maps[-1], atol=1e-6)
    assert vit.position.table.shape == (16, 48)


def test_final_norm_can_differ_from_the_blocks():
    vit = built("plain", norm="dyt", final_norm="layernorm")
    assert type(vit.norm) is NORMS["layernorm"]


def test_public_names_are_all_there():
    for name in fathoms.__all__:
        assert getattr(fathoms, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fathoms.nonsense  # noqa: B018


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_logits_are_those_of_all_tokens(variant):
    """`forward` norms only the tokens that are read; the others change nothing."""
    vit = built(variant).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(vit(images), vit.forward_head(vit.forward_features(images)), rtol=1e-5, atol=1e-6)
