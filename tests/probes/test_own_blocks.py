"""The probe follows the additions of blocks that anyone writes, and says which it could not see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fathoms
from fathoms.probes.blocks import branch_parameters

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def plain(x, f):
    return x + f


def alpha(x, f):
    return torch.add(x, f, alpha=0.25)


def alpha_of_the_stream(x, f):
    return torch.add(f, x, alpha=0.25)


def named(x, f):
    return torch.add(input=x, other=f)


def into_a_copy(x, f):
    x = x.clone()
    x += f
    return x


def into_the_branch(x, f):
    f += x
    return f


def lerp(x, f):
    return torch.lerp(x, f, 0.1)


def hidden(x, f):
    return torch.stack([x, f]).sum(0)


class OwnBlock(nn.Module):
    def __init__(self, joins, in_tuple):
        super().__init__()
        self.joins, self.in_tuple = joins, in_tuple
        self.n1, self.n2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.seen = []

    def forward(self, x):
        x = x[0] if self.in_tuple else x
        h = self.n1(x)
        for join, branch in zip(self.joins, (lambda _: self.attn(h, h, h)[0], self.mlp_branch), strict=True):
            f = branch(x)
            self.seen.append((x.detach().clone(), f.detach().clone()))
            x = join(x, f)
        return (x, None) if self.in_tuple else x

    def mlp_branch(self, x):
        return self.mlp(self.n2(x))


class OwnNet(nn.Module):
    def __init__(self, joins, in_tuple=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 3)
        self.blocks = nn.ModuleList([OwnBlock(joins, in_tuple)])

    def forward(self, images):
        x = self.stem(images).flatten(2).transpose(1, 2)
        x = self.blocks[0]((x, None))[0] if self.blocks[0].in_tuple else self.blocks[0](x)
        return self.head(x.mean(1))


def size(x):
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize(
    ("join", "skip", "branch"),
    [
        (plain, 1, 1),
        (alpha, 1, 0.25),
        (alpha_of_the_stream, 0.25, 1),
        (named, 1, 1),
        (into_a_copy, 1, 1),
        (into_the_branch, 1, 1),
        (lerp, 0.9, 0.1),
    ],
)
def test_an_addition_of_any_form_is_measured_with_its_factors(join, skip, branch):
    model = OwnNet((join, join))
    signal = fathoms.probe(model, IMAGES)
    assert [site.branch for site in signal] == ["attn", "mlp"]
    assert signal.unseen == ()
    for site, (x, f) in zip(signal, model.blocks[0].seen, strict=True):
        assert site.stream == pytest.approx(size(x), rel=1e-5)
        assert site.added == pytest.approx(branch * size(f), rel=1e-5)
        assert site.ratio == pytest.approx(branch * size(f) / (skip * size(x)), rel=1e-5)


def test_a_block_that_takes_and_gives_a_tuple_is_followed():
    assert fathoms.probe(OwnNet((plain, plain), in_tuple=True), IMAGES) == fathoms.probe(
        OwnNet((plain, plain)), IMAGES
    )


def test_an_addition_that_was_not_seen_is_said():
    signal = fathoms.probe(OwnNet((plain, hidden)), IMAGES)
    assert [site.branch for site in signal] == ["attn"]
    assert signal.unseen == ("blocks.0: the addition of its MLP was not seen",)
    assert signal.to_json()["unseen"] == list(signal.unseen)
    signal = fathoms.probe(OwnNet((hidden, hidden)), IMAGES)
    assert [site.branch for site in signal] == ["block"]
    assert signal.unseen == ("blocks.0: no addition was seen; its row is of the whole block",)


def test_norms_called_n1_and_n2_belong_to_the_branch_that_they_enter():
    model = OwnNet((plain, plain))
    block = model.blocks[0]
    nn.init.constant_(block.n1.weight, 2.0)
    nn.init.constant_(block.n2.weight, 3.0)
    attn, mlp = fathoms.probe(model, IMAGES)
    assert (attn.norm_mean, mlp.norm_mean) == (2.0, 3.0)
    assert {name.split(".")[0] for name, _ in branch_parameters(block, "attn")} == {"n1", "attn"}
