"""The contract of attentions and MLPs. A new one gets these tests by being registered."""

from __future__ import annotations

import pytest
import torch

from fathoms import FathomsError
from fathoms.parts import ATTENTIONS, MLPS, ClassAttention, ClassBlock, GeluMLP
from fathoms.parts.linears import SHIFTED

BRANCHES = [f"attention:{name}" for name in ATTENTIONS] + [f"mlp:{name}" for name in MLPS]


def build(kind, **options):
    family, name = kind.split(":")
    return (
        ATTENTIONS.build(name, 48, 4, **options) if family == "attention" else MLPS.build(name, 48, **options)
    )


def inputs_of(branch, dtype=torch.float32):
    x = torch.randn(2, 9, 48, dtype=dtype)
    return (x[:, :1], x) if isinstance(branch, ClassAttention) else (x,)


@pytest.fixture(params=BRANCHES)
def kind(request):
    torch.manual_seed(0)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_shape_and_dtype(kind, dtype):
    branch = build(kind).to(dtype)
    inputs = inputs_of(branch, dtype)
    y = branch(*inputs)
    assert (y.shape, y.dtype) == (inputs[0].shape, dtype)


def test_gives_a_finite_gradient_to_every_parameter(kind):
    branch = build(kind)
    branch(*inputs_of(branch)).square().sum().backward()
    for name, parameter in branch.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_scaling_its_ends_scales_what_enters_and_what_leaves(kind):
    """The contract of `ends`, on which the absorbing of norms and residual scales rests."""
    torch.manual_seed(0)
    branch = build(kind)
    inputs = inputs_of(branch)
    first, last = branch.ends()
    expected = 3 * branch(*(2 * x for x in inputs))
    with torch.no_grad():
        for linear in first:
            linear.weight.mul_(2)
        last.weight.mul_(3)
        last.bias.mul_(3)
    assert torch.allclose(branch(*inputs), expected, rtol=1e-4, atol=1e-5)


def test_is_finite_on_large_inputs(kind):
    branch = build(kind)
    assert branch(*(1e4 * x for x in inputs_of(branch))).isfinite().all()


def test_survives_save_and_load(kind):
    branch, twin = build(kind), build(kind)
    twin.load_state_dict(branch.state_dict())
    inputs = inputs_of(branch)
    assert torch.equal(branch(*inputs), twin(*inputs))


def test_roles_are_views_of_the_parameters(kind):
    branch = build(kind)
    for _, weight in branch.roles():
        weight.fill_(3.0)
    matrices = [p for name, p in branch.named_parameters() if p.ndim == 2 and "proj_" not in name]
    assert all(matrix.eq(3.0).all() for matrix in matrices)


def test_takes_fixups_shifted_layers(kind):
    branch = build(kind, layers=SHIFTED)
    assert any(name.endswith("shift") for name, _ in branch.named_parameters())
    branch(*inputs_of(branch)).sum().backward()


@pytest.mark.compile
def test_compiles_in_one_graph(kind):
    branch = build(kind)
    inputs = inputs_of(branch)
    compiled = torch.compile(branch, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(*inputs), branch(*inputs), atol=1e-5)


@pytest.mark.parametrize("name", list(ATTENTIONS))
@pytest.mark.parametrize("qk_norm", ["rmsnorm", "layernorm"])
def test_qk_norm_is_one_for_all_heads_and_changes_the_output(name, qk_norm):
    torch.manual_seed(0)
    attention, plain = ATTENTIONS.build(name, 48, 4, qk_norm=qk_norm), ATTENTIONS.build(name, 48, 4)
    assert attention.q_norm.weight.shape == (12,)
    plain.load_state_dict(attention.state_dict(), strict=False)
    inputs = inputs_of(attention)
    assert not torch.allclose(attention(*inputs), plain(*inputs))


def test_heads_must_divide_the_width():
    for name in ATTENTIONS:
        with pytest.raises(FathomsError, match=r"dim=48 is not divisible by heads=5"):
            ATTENTIONS.build(name, 48, 5)


def test_talking_heads_with_identity_mixers_is_plain_attention():
    talking, plain = build("attention:talking_heads"), build("attention:softmax")
    # CaiT starts them at a deviation of 0.02; torch's own start of a linear of four inputs has 0.29.
    assert torch.cat([talking.proj_l.weight, talking.proj_w.weight]).std() < 0.04
    with torch.no_grad():
        for mixer in (talking.proj_l, talking.proj_w):
            mixer.weight.copy_(torch.eye(4))
            mixer.bias.zero_()
    plain.load_state_dict(talking.state_dict(), strict=False)
    x = torch.randn(2, 9, 48)
    assert torch.allclose(talking(x), plain(x), atol=1e-6)


def test_class_attention_writes_the_queries_and_reads_the_context():
    block = ClassBlock(48, 4, norm="layernorm", depth=2)
    queries, context = torch.randn(2, 1, 48), torch.randn(2, 9, 48, requires_grad=True)
    before = context.detach().clone()
    block(queries, context).sum().backward()
    assert torch.equal(context.detach(), before)
    assert context.grad.any()


def test_class_attention_calls_linears_that_do_more_than_multiply():
    """A hook on its keys is called, and each impl gives the same output."""
    torch.manual_seed(0)
    attention = ClassAttention(48, 4)
    inputs = torch.randn(2, 2, 48), torch.randn(2, 9, 48)
    absorbed = attention(*inputs)
    seen = []
    handle = attention.k.register_forward_hook(lambda _module, _inputs, out: seen.append(out.shape))
    hooked = attention(*inputs)
    handle.remove()
    assert seen == [(2, 2, 48), (2, 9, 48)]
    assert torch.allclose(hooked, absorbed, atol=1e-6)
    shifted = ClassAttention(48, 4, layers=SHIFTED)
    for linear in (shifted.k, shifted.v):
        torch.nn.init.constant_(linear.pre.shift, 0.5)
    moved = shifted(*inputs)
    torch.nn.init.zeros_(shifted.v.pre.shift)
    assert not torch.allclose(shifted(*inputs), moved)
    shifted.impl = "absorbed"
    with pytest.raises(FathomsError, match='impl="absorbed" cannot run: k or v is more than a plain linear'):
        shifted(*inputs)


def test_swiglu_has_about_as_many_weights_as_gelu():
    count = {name: sum(p.numel() for p in MLPS.build(name, 384).parameters()) for name in MLPS}
    assert count["swiglu"] == pytest.approx(count["gelu"], rel=0.01)


def test_mlp_ratio_sets_the_width():
    assert GeluMLP(48, 2.5).fc1.out_features == 120
