"""Attention maps over the patches."""

from __future__ import annotations

import pytest
import torch

from fathoms import FathomsError, create_model
from fathoms.probes.attention_maps import attention_by_head, attention_maps

DIGITS = {"num_classes": 10, "depth": 2}


def model(**more):
    torch.manual_seed(0)
    return create_model("vit_digits", **DIGITS | more).eval()


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"readout": "mean"},
        {"readout": "class_attention", "attention": "talking_heads"},
        {"position": "rope", "registers": 4, "qk_norm": "rmsnorm", "heads": 4},
    ],
    ids=str,
)
def test_maps_are_shares_of_the_patches(switches):
    vit = model(**switches).train()
    maps = attention_maps(vit, torch.randn(3, 1, 8, 8))
    assert vit.training
    assert maps.shape == (3, 4, 4)
    assert (maps >= 0).all()
    assert torch.allclose(maps.sum((1, 2)), torch.ones(3))


@pytest.mark.parametrize("depth", [1, 3])
def test_rollout_multiplies_the_maps_with_their_skips_from_the_last_block_to_the_first(depth):
    """The class token's row of the product of (A + I) / 2, over the patches, as shares; the maps do not commute."""
    vit, seen, product = model(depth=depth), [], torch.eye(17)
    for block in vit.blocks:
        with torch.no_grad():
            block.attn.qkv.weight.mul_(20)
        block.attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    maps = attention_maps(vit, torch.randn(2, 1, 8, 8))
    for block, tokens in zip(vit.blocks, seen, strict=True):
        q, k, _ = block.attn.project(tokens, None)
        product = ((q @ k.transpose(-2, -1) * 16**-0.5).softmax(-1).mean(1) + torch.eye(17)) / 2 @ product
    expected = product[:, 0, 1:] / product[:, 0, 1:].sum(-1, keepdim=True)
    assert torch.allclose(maps.flatten(1), expected, atol=1e-5)


@pytest.mark.parametrize("switches", [{"readout": "mean_cls"}, {"readout": "mean", "registers": 2}], ids=str)
def test_maps_are_of_the_tokens_that_the_head_reads(switches):
    vit = model(depth=1, **switches)
    with torch.no_grad():
        vit.blocks[0].attn.qkv.weight.mul_(20)
    seen = []
    vit.blocks[0].attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    image, prefix = torch.randn(1, 1, 8, 8), vit.num_prefix_tokens
    maps = attention_maps(vit, image)
    q, k, _ = vit.blocks[0].attn.project(seen[0], None)
    probs = (q @ k.transpose(-2, -1) * 16**-0.5).softmax(-1)[0, :, prefix:, prefix:]
    heads = attention_by_head(vit, image[0])["blocks.0"].flatten(1)
    torch.testing.assert_close(heads, probs.mean(1) / probs.mean(1).sum(-1, keepdim=True))
    rows = (probs.mean(0) + torch.eye(16)).mean(0)
    torch.testing.assert_close(maps.flatten(), rows / rows.sum())


def test_talking_heads_are_drawn_with_the_bias_of_their_mixing():
    """A bias far above every probability makes all patches equal, and so it makes the map."""
    vit = model(depth=1, attention="talking_heads")
    with torch.no_grad():
        vit.blocks[0].attn.qkv.weight.mul_(20)
        vit.blocks[0].attn.proj_w.bias.fill_(1e4)
    maps = attention_maps(vit, torch.randn(2, 1, 8, 8))
    assert torch.allclose(maps, torch.full_like(maps, 1 / 16), atol=1e-5)


def test_a_model_that_is_not_a_fathoms_model_is_refused():
    with pytest.raises(FathomsError, match="of fathoms models only, not of Flatten; leave --attention out"):
        attention_maps(torch.nn.Flatten(), torch.zeros(1, 3, 8, 8))
