"""Residual methods that read the stream: each formula against one written apart, in float64, with its gradients."""

from __future__ import annotations

import pytest
import torch

from fathoms import ViT, ViTConfig
from fathoms.parts import MeanVarianceSplit, OrthogonalUpdate
from fathoms.parts.block import Block

DIM, PREFIX = 6, 2


def tensors(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def same(ours, theirs, inputs):
    """Outputs and the gradients of a weighted sum agree."""
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)
    weight = torch.arange(ours.numel(), dtype=torch.float64).view_as(ours).sin()
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def orthogonal(f, x):
    """Token by token: f without its projection on x."""
    rows = []
    for a, b in zip(f.reshape(-1, DIM), x.reshape(-1, DIM), strict=True):
        rows.append(a - b * torch.dot(a, b) / (torch.dot(b, b) + 1e-6))
    return torch.stack(rows).view_as(f)


def test_orthogonal_is_its_formula():
    f, x = tensors((2, 5, DIM), (2, 5, DIM))
    same(OrthogonalUpdate(DIM)(f, x), orthogonal(f, x), [f, x])


def test_an_orthogonal_update_is_orthogonal_and_a_stream_of_zeros_takes_the_branch():
    f, x = (t.detach() for t in tensors((2, 5, DIM), (2, 5, DIM)))
    assert (OrthogonalUpdate(DIM)(f, x) * x).sum(-1).abs().max() < 1e-5
    assert torch.equal(OrthogonalUpdate(DIM)(f, torch.zeros_like(x)), f)


def mv_split(f, x, alpha, beta):
    """Image by image, as the paper has it on patches; tokens in front of them take beta f."""
    images = []
    for a, b in zip(f, x, strict=True):
        mean_f, mean_x = sum(a[PREFIX:]) / len(a[PREFIX:]), sum(b[PREFIX:]) / len(b[PREFIX:])
        patches = [beta * (row - mean_f) + alpha * (mean_f - mean_x) for row in a[PREFIX:]]
        images.append(torch.stack([*(beta * row for row in a[:PREFIX]), *patches]))
    return torch.stack(images)


def test_mv_split_is_its_formula():
    f, x, alpha, beta = tensors((2, 7, DIM), (2, 7, DIM), (DIM,), (DIM,))
    rule = MeanVarianceSplit(DIM, prefix=PREFIX).double()
    rule.alpha, rule.beta = torch.nn.Parameter(alpha), torch.nn.Parameter(beta)
    inputs = [f, x, rule.alpha, rule.beta]
    same(rule(f, x), mv_split(f, x, rule.alpha, rule.beta), inputs)


def test_mv_split_starts_as_its_authors_port_does():
    rule = MeanVarianceSplit(DIM)
    assert rule.prefix == Block(DIM, 1, residual="mv_split").attn_join.scale.prefix == 0
    assert rule.alpha.eq(0).all()
    assert rule.beta.eq(0.03).all()


@pytest.mark.parametrize(("late", "prefixes"), [(0, [3, 3, 3]), (2, [2, 2, 3])])
def test_the_mean_leaves_out_registers_and_the_class_token_once_it_is_there(late, prefixes):
    config = {"image_size": 8, "patch_size": 4, "dim": 8, "heads": 2, "depth": 3, "registers": 2}
    model = ViT(ViTConfig(**config, residual="mv_split", class_token_block=late))
    assert [block.mlp_join.scale.prefix for block in model.blocks] == prefixes


@pytest.mark.parametrize("name", ["orthogonal", "mv_split"])
def test_drop_path_drops_the_whole_update(name):
    torch.manual_seed(0)
    block = Block(8, 2, residual=name, drop_path=0.99).train()
    x = torch.randn(4, 5, 8)
    assert torch.equal(block(x), x)


def keel(blocks, x):
    """The stream after `blocks`, by the formula: N(2L x + F(N x)), the first branch x + F(N x)."""
    alpha = 2 * len(blocks)
    for index, block in enumerate(blocks):
        for number, (join, branch) in enumerate(((block.attn_join, block.attn), (block.mlp_join, block.mlp))):
            f = branch(join.norm(x))
            x = x + f if index == number == 0 else join.post_norm(alpha * x + f)
    return x


def test_keel_is_its_formula():
    torch.manual_seed(0)
    placed = {"attn_placement": "keel", "mlp_placement": "keel"}
    blocks = torch.nn.ModuleList(Block(DIM, 2, depth=3, index=i, **placed) for i in range(3)).double()
    assert [block.attn_join.post_norm is None for block in blocks] == [True, False, False]
    (x,) = tensors((2, 5, DIM))
    out = x
    for block in blocks:
        out = block(out)
    same(out, keel(blocks, x), [x, *blocks.parameters()])


def test_mix_ln_is_one_line():
    config = {"image_size": 8, "patch_size": 4, "dim": 8, "heads": 2, "depth": 4}
    model = ViT(ViTConfig(**config, placement_by_depth="0:post"))
    assert [block.attn_join.placement for block in model.blocks] == ["post", "pre", "pre", "pre"]
    assert [block.mlp_join.placement for block in model.blocks] == ["post", "pre", "pre", "pre"]
