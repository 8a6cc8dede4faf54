"""Transfer over depth and width: multipliers of the parameter groups, and the coordinate check."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.probes.coordinates import coordinate_check
from fathoms.training.optimization import build_optimizer

TINY = {"image_size": 8, "patch_size": 2, "dim": 32, "heads": 4, "mlp_ratio": 2.0, "num_classes": 10}
IMAGES = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8)


def vit(residual="completep", depth=4, **more):
    torch.manual_seed(more.pop("seed", 0))
    return ViT(ViTConfig(**TINY | {"depth": depth, "residual": residual} | more))


def multipliers(model, key, weight_decay=1.0):
    groups = fathoms.param_groups(model, weight_decay)
    return {name: group[key] for group in groups for name in group["names"]}


@pytest.mark.parametrize(("residual", "alpha"), [("completep", 1.0), ("depth_mup", 0.5)])
def test_multipliers_are_those_of_the_paper(residual, alpha):
    """Table 1 of arXiv:2505.01618, written out for m_L = 4 and m_N = 2."""
    model = vit(residual, depth=8, base_depth=2, base_dim=16, qk_norm="rmsnorm")
    rate, decay, eps = (multipliers(model, key) for key in ("lr_scale", "weight_decay", "eps_scale"))
    for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
        matrix, bias = f"blocks.3.{name}.weight", f"blocks.3.{name}.bias"
        assert rate[matrix] == pytest.approx(0.5 * 4 ** (alpha - 1))
        assert rate[bias] == pytest.approx(4 ** (alpha - 1))
        assert (decay[matrix], decay[bias]) == (2.0, 0.0)
        assert eps[matrix] == eps[bias] == pytest.approx(0.5 * 4**-alpha)
    gain = "blocks.3.mlp_join.norm.weight"
    assert (rate[gain], eps[gain]) == pytest.approx((4 ** (alpha - 1), 0.5 * 4**-alpha))
    assert eps["blocks.0.attn.q_norm.weight"] == pytest.approx(4**-alpha)
    for name in ("stem.proj.weight", "head.weight", "position.table", "readout.queries", "norm.weight"):
        assert (rate[name], eps[name]) == (1.0, 0.5), name
    assert (decay["stem.proj.weight"], decay["head.weight"]) == (1.0, 1.0)
    assert multipliers(model, "why")["head.weight"] == "a matrix; eps x m_N^-1"


def test_forward_and_gradient_are_those_of_the_formula():
    """x + F(N x) / m_L for both branches and W x / m_N for the head, written apart, in float64."""
    model = vit(depth=3, base_depth=2, base_dim=8).double()
    images = IMAGES.double()
    x = model.embed(images)
    for block in model.blocks:
        x = x + block.attn(block.attn_join.norm(x)) * (2 / 3)
        x = x + block.mlp(block.mlp_join.norm(x)) * (2 / 3)
    expected = F.linear(model.norm(x)[:, 0], model.head.weight / 4, model.head.bias)
    got = model(images)
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-14)
    ours, theirs = (
        torch.autograd.grad(logits.square().sum(), list(model.parameters()), retain_graph=True)
        for logits in (got, expected)
    )
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in zip(ours, theirs, strict=True))


def test_matrices_start_smaller_with_the_width_and_nothing_else_does():
    wide, plain = vit(dim=64, base_dim=16), vit(dim=64)
    for (name, a), b in zip(wide.named_parameters(), plain.parameters(), strict=True):
        hidden = a.ndim == 2 and name.startswith("blocks.")
        assert torch.equal(a, b * 0.5 if hidden else b), name


def test_learning_rate_and_epsilon_of_each_group_reach_the_optimizer():
    model = vit("depth_mup", depth=8, base_depth=2)
    optimizer = build_optimizer(fathoms.param_groups(model, 0.1, layer_decay=0.5), "adamw", lr=0.1, eps=1e-6)
    found = {name: group for group in optimizer.param_groups for name in group["names"]}
    first, last = found["blocks.0.mlp.fc1.weight"], found["blocks.7.mlp.fc1.weight"]
    assert (last["lr"], first["lr"]) == pytest.approx((0.1 * 0.5 * 0.5, 0.1 * 0.5 * 0.5**8))
    assert first["eps"] == last["eps"] == pytest.approx(0.5e-6)
    assert found["head.weight"]["eps"] == pytest.approx(1e-6)
    assert found["head.weight"]["lr"] == pytest.approx(0.1)


def test_groups_for_an_adam_of_your_own_have_their_numbers():
    groups = fathoms.param_groups(vit("depth_mup", depth=8, base_depth=2), 0.1)
    optimizer = torch.optim.AdamW(groups.at(lr=0.1, eps=1e-6))
    found = {name: (g["lr"], g["eps"]) for g in optimizer.param_groups for name in g["names"]}
    assert found["blocks.0.mlp.fc1.weight"] == pytest.approx((0.05, 0.5e-6))
    assert found["head.weight"] == pytest.approx((0.1, 1e-6))


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_other_residuals_keep_one_epsilon(name):
    optimizer = build_optimizer(fathoms.param_groups(vit("layerscale"), 0.1), name, lr=0.1)
    adam = [group["eps"] for group in optimizer.param_groups if group.get("algorithm") != "muon"]
    assert set(adam) == {1e-6 if name == "lamb" else 1e-8}


def test_muon_takes_the_root_of_the_width():
    groups = fathoms.param_groups(vit(base_dim=8), 0.1)
    optimizer = build_optimizer(groups, "muon", lr=0.1)
    found = {name: group for group in optimizer.param_groups for name in group["names"]}
    matrix = found["blocks.0.attn.qkv.weight"]
    assert (matrix["lr"], matrix["weight_decay"]) == pytest.approx((0.05, 0.2))
    assert found["head.weight"]["lr"] == pytest.approx(0.1)


def test_optimizers_without_a_rule_are_refused():
    wide, deep = fathoms.param_groups(vit(base_dim=8), 0.1), fathoms.param_groups(vit(base_depth=2), 0.1)
    with pytest.raises(FathomsError, match="--opt lamb: its steps are in proportion to the weights"):
        build_optimizer(wide, "lamb", lr=0.1)
    build_optimizer(deep, "lamb", lr=0.1)
    for name in ("sgd", "momentum"):
        with pytest.raises(FathomsError, match=f"--opt {name}: its steps are in proportion to the gradients"):
            build_optimizer(deep, name, lr=0.1)


def test_the_table_says_what_is_multiplied_and_why():
    table = fathoms.param_groups(vit(depth=8, base_depth=2), 0.05).table()
    row = next(line for line in table.splitlines() if "blocks.7.mlp.fc1.weight" in line)
    assert " ".join(row.split()) == "4 0.05 1 0.25 blocks.7.mlp.fc1.weight a matrix; eps x m_L^-1"


def test_blocks_of_class_attention_are_not_scaled_by_the_depth():
    model = vit(depth=8, base_depth=2, readout="class_attention")
    assert model.blocks[0].attn_join.scale.factor == 0.25
    assert {block.attn_join.scale.factor for block in model.readout.blocks} == {1.0}
    assert multipliers(model, "eps_scale")["readout.blocks.0.mlp.fc1.weight"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_depth": 0}, "base_depth=0 is too small; give the depth that the learning rate was tuned at"),
        ({"base_dim": -1}, "base_dim=-1 is too small"),
        (
            {"base_dim": 12},
            "base_dim=12: heads keep their width, 8 at dim=32 and heads=4; give a multiple of 8",
        ),
        ({"base_depth": 100}, "base_depth=100 is more than 16 times depth=4"),
        ({"residual": "none", "base_depth": 2}, "residual 'none' takes no base_depth; leave it out"),
        ({"residual": "layerscale", "base_dim": 2}, "residual 'layerscale' takes no base_dim"),
        (
            {"base_dim": 8, "attention": "talking_heads"},
            "base_dim: there is no rule for the matrices that mix",
        ),
        ({"residual_init": 0.1}, "residual 'completep' takes no residual_init"),
    ],
)
@pytest.mark.plain
def test_a_base_that_makes_no_sense_is_refused_in_one_line(options, message):
    with pytest.raises(FathomsError, match=message) as caught:
        vit(**{"residual": "completep"} | options)
    assert "\n" not in str(caught.value)


def test_another_residual_forgets_the_base():
    assert vit(base_depth=2).config.replace(residual="layerscale").base_depth is None


def test_folds_into_the_linears_and_the_head():
    model = vit(depth=3, base_depth=1, base_dim=8)
    folded, report = fathoms.fold(model, images=IMAGES)
    assert report.left == ()
    assert folded.config.residual == "none"
    assert type(folded.head) is torch.nn.Linear
    assert not any("alpha" in name for name, _ in folded.named_parameters())


def slope(residual, depths=(2, 8, 32), *, eps=1e-8, opt="adamw", change=list):
    """Exponent of the depth in the rise of mean |x| after the last block, in ten updates on one batch."""
    base = {} if residual == "none" else {"base_depth": 2}

    def optimizer(model):
        groups = fathoms.param_groups(model, 0.0)
        change(groups)
        return build_optimizer(groups, opt, lr=1e-3, eps=eps)

    def build(depth):
        # From torch's start of a convolution, eight times as wide here, the stream of completep under muon rises by the
        # power 0.31 of the depth, and that of depth_mup by -0.20: the rules are about what the blocks add.
        return ViT(ViTConfig(**TINY, depth=depth, residual=residual, stem_init="trunc_normal", **base))

    check = coordinate_check(build, depths, IMAGES, LABELS, optimizer=optimizer, seeds=range(3))
    return check.stream.value


def one_rate(groups):
    for group in groups:
        group["lr_scale"] = 1.0


def one_epsilon(groups):
    for group in groups:
        group["eps_scale"] = 1.0


@pytest.mark.plain
@pytest.mark.parametrize("opt", ["adamw", "muon"])
def test_with_completep_ten_updates_move_the_stream_alike_at_every_depth_and_without_it_they_do_not(opt):
    assert abs(slope("completep", opt=opt)) < 0.2
    assert slope("none", depths=(2, 32), opt=opt) > 0.7


@pytest.mark.plain
def test_the_coordinate_check_fails_without_a_learning_rate_or_an_epsilon_rule():
    """The epsilon must be near the gradients of this small model to count: at 1e-8 its rule changes nothing."""
    assert abs(slope("depth_mup", depths=(2, 32))) < 0.2
    assert slope("depth_mup", depths=(2, 32), change=one_rate) > 0.3
    assert abs(slope("completep", depths=(2, 32), eps=1e-3)) < 0.2
    assert slope("completep", depths=(2, 32), eps=1e-3, change=one_epsilon) < -0.25


def change_by_matrices(dim, change):
    """Mean change of the stream in ten of Muon's updates of the matrices alone; heads have eight channels."""
    model = vit(depth=2, base_depth=2, dim=dim, heads=dim // 8, base_dim=32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("blocks.") and parameter.ndim == 2)
    groups = fathoms.param_groups(model, 0.0)
    change(groups)
    optimizer = build_optimizer(groups, "muon", lr=1e-3)
    before = model._stream(IMAGES).detach()
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(IMAGES), LABELS).backward()
        optimizer.step()
    return (model._stream(IMAGES).detach() - before).abs().mean().item()


def adams_rule(groups):
    for group in groups:
        group["width"] = 1.0


def no_rule(groups):
    adams_rule(groups)
    one_rate(groups)


@pytest.mark.plain
@pytest.mark.parametrize(("change", "power"), [(list, 0.0), (no_rule, 0.5), (adams_rule, -0.5)])
def test_muons_rule_for_the_width_keeps_the_change_of_the_stream(change, power):
    """Its learning rate falls with the root of the width; unscaled it is too large, by Adam's rule too small."""
    narrow, wide = change_by_matrices(32, change), change_by_matrices(256, change)
    assert math.log(wide / narrow) / math.log(8) == pytest.approx(power, abs=0.15)
