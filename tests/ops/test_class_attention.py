"""Class attention without keys and values: the numbers and gradients of the plain form, in less memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fathoms import FathomsError
from fathoms.ops import attention_ops as op
from fathoms.ops.attention_ops import class_attention, class_attention_reference, pays
from fathoms.parts import ClassAttention

# torch says this once, in the thread that runs the first backward pass of a process on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")

NAMES = ("q", "queries", "context", "key_weight", "key_bias", "value_weight", "value_bias")
# name: (B, Q, N, D, H), size of q, with biases
CASES = {
    "one_query": ((3, 1, 64, 96, 4), 1.0, True),
    "two_queries_odd_context": ((3, 2, 65, 48, 4), 1.0, True),
    "no_biases": ((2, 1, 17, 96, 6), 1.0, False),
    "one_head": ((4, 1, 9, 48, 1), 1.0, True),
    "one_token": ((2, 2, 1, 32, 2), 1.0, True),
    "many_queries": ((1, 7, 21, 32, 4), 1.0, True),
    "large_logits": ((3, 1, 196, 96, 4), 30.0, True),
    "large_logits_two_queries": ((2, 2, 33, 48, 3), 30.0, True),
}


def make_inputs(shape, size=1.0, biases=True, dtype=torch.float64, device="cpu"):
    """Leaves as the layer has them: q a view of its projection, weights that keep the size of a token."""
    generator = torch.Generator().manual_seed(0)
    B, Q, N, D, H = shape

    q = (size * torch.randn(B, Q, D, generator=generator)).unflatten(-1, (H, -1)).transpose(1, 2)
    # Tokens of one image have much in common: what is the same in all of them cancels in the softmax.
    tokens = torch.randn(B, 1, D, generator=generator) + torch.randn(B, Q + N, D, generator=generator)
    key, value = (torch.randn(D, D, generator=generator) * D**-0.5 for _ in range(2))
    key_bias, value_bias = (torch.randn(D, generator=generator) if biases else None for _ in range(2))
    leaves = [q, tokens[:, :Q], tokens[:, Q:], key, key_bias, value, value_bias]
    grad = torch.randn(B, H, Q, D // H, generator=generator).to(device, dtype)
    return [x if x is None else x.to(device, dtype).detach().requires_grad_() for x in leaves], grad


def outcome(form, leaves, grad):
    """Output and gradients by name."""
    out = form(*leaves)
    given = {name: leaf for name, leaf in zip(NAMES, leaves, strict=True) if leaf is not None}
    return {
        "out": out.detach(),
        **dict(zip(given, torch.autograd.grad(out, list(given.values()), grad), strict=True)),
    }


def absorbed(*leaves):
    return class_attention(*leaves, impl="absorbed")


def errors(results, exact):
    """Norm of the difference over the norm of the truth; the key bias has none but zero."""
    return {
        name: ((results[name].double() - value).norm() / value.norm()).item()
        for name, value in exact.items()
        if name != "key_bias"
    }


def exact_outcome(leaves, grad):
    wide = [x if x is None else x.detach().double().requires_grad_() for x in leaves]
    return outcome(class_attention_reference, wide, grad.double())


@pytest.mark.parametrize("name", CASES)
def test_in_float64_both_forms_are_the_same(name):
    shape, size, biases = CASES[name]
    leaves, grad = make_inputs(shape, size, biases)
    results = outcome(absorbed, leaves, grad)
    off = errors(results, outcome(class_attention_reference, leaves, grad))
    assert all(error < 1e-12 for error in off.values()), off
    assert not biases or not results["key_bias"].any()


@pytest.mark.parametrize("device_sums", [False, True], ids=["copied", "split"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_half_precision_errs_no_more_than_the_plain_form(name, dtype, device_sums, monkeypatch):
    """At most 1.2 times as far from float64. The form for a GPU runs here with a product that stands for its own."""
    if device_sums:
        monkeypatch.setattr(op, "_accumulates_wide", lambda _: True)
        monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    shape, size, biases = CASES[name]
    leaves, grad = make_inputs(shape, size, biases, dtype)
    results = outcome(absorbed, leaves, grad)
    assert all(value.dtype == dtype for value in results.values())
    exact = exact_outcome(leaves, grad)
    own, plain = errors(results, exact), errors(outcome(class_attention_reference, leaves, grad), exact)
    assert all(own[key] <= 1.2 * plain[key] for key in exact if key in own), (own, plain)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_narrow_numbers_hold_a_wide_one_compiled_too(dtype):
    a = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    for form in (op._halves, torch.compile(op._halves, fullgraph=True)):
        high, low = form(a, dtype)
        assert high.dtype == low.dtype == dtype
        off = (high.double() + low.double() - a.double()).abs()
        # Below fp16's smallest normal number what is left has fewer digits.
        assert (off <= torch.finfo(dtype).eps ** 2 * a.abs() + 2.0**-25).all()


@pytest.mark.parametrize("name", CASES)
def test_under_autocast_too(name):
    shape, size, biases = CASES[name]
    leaves, grad = make_inputs(shape, size, biases, torch.float32)
    exact = exact_outcome(leaves, grad)
    found = []
    # The backward pass is inside as well, where its products would be autocast too.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for form in (absorbed, class_attention_reference):
            results = outcome(form, leaves, grad.bfloat16())
            assert results["out"].dtype == torch.bfloat16
            assert results["context"].dtype == torch.float32
            found.append(errors(results, exact))
    assert all(found[0][key] <= 1.2 * found[1][key] for key in found[0]), found


def test_gradients_of_first_and_second_order():
    leaves, _ = make_inputs((1, 2, 3, 8, 2))
    assert torch.autograd.gradcheck(absorbed, leaves)
    assert torch.autograd.gradgradcheck(absorbed, leaves)


# torch says this of its own derivatives, when the first is asked for.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_has_the_derivative_of_the_plain_form():
    (q, queries, context, *weights), _ = make_inputs((2, 1, 9, 32, 2))
    moved = context.detach(), torch.randn_like(context)
    with sdpa_kernel(SDPBackend.MATH):
        ours, plain = (
            torch.func.jvp(lambda x, form=form: form(q, queries, x, *weights), *((part,) for part in moved))
            for form in (absorbed, class_attention_reference)
        )
    assert torch.allclose(ours[1], plain[1])


def test_layout_of_the_context_does_not_matter():
    leaves, grad = make_inputs((3, 1, 12, 32, 4))
    exact = outcome(absorbed, leaves, grad)
    context = leaves[2].detach()
    padded = torch.cat([context[:, :1], context], dim=1)
    for other in (context.mT.contiguous().mT, padded[:, 1:]):
        assert not other.is_contiguous()
        results = outcome(absorbed, [*leaves[:2], other.requires_grad_(), *leaves[3:]], grad)
        assert all(error < 1e-12 for error in errors(results, exact).values())


def test_only_what_asks_for_a_gradient_gets_one():
    leaves, grad = make_inputs((2, 1, 9, 32, 4))
    exact = outcome(absorbed, leaves, grad)
    for index, name in enumerate(NAMES):
        alone = [x.detach().requires_grad_(place == index) for place, x in enumerate(leaves)]
        absorbed(*alone).backward(grad)
        assert torch.allclose(alone[index].grad, exact[name])
        assert all(x.grad is None for place, x in enumerate(alone) if place != index)
    with torch.no_grad():
        assert not absorbed(*leaves).requires_grad


def test_of_the_context_nothing_but_itself_is_kept():
    """The plain form keeps its keys and its values, each of the context's size."""
    leaves, _ = make_inputs((8, 1, 196, 48, 4), dtype=torch.float32)
    kept = {}
    for form in (absorbed, class_attention_reference):
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.update(
                {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}
            ),
            id,
        ):
            form(*leaves)
        own = {x.untyped_storage().data_ptr() for x in leaves}
        kept[form] = sum(size for place, size in sizes.items() if place not in own)
    context = leaves[2].nbytes
    assert kept[class_attention_reference] > 2 * context
    assert kept[absorbed] < 0.25 * context


def test_auto_absorbs_where_queries_are_few():
    assert pays(1, 8, 384)
    assert not pays(16, 8, 384)
    for queries in (1, 9):
        leaves, _ = make_inputs((2, queries, 12, 32, 2), dtype=torch.float32)
        form = absorbed if queries == 1 else class_attention_reference
        assert torch.equal(class_attention(*leaves), form(*leaves))
        assert not torch.equal(absorbed(*leaves), class_attention_reference(*leaves))


@pytest.mark.plain
def test_an_unknown_form_is_refused():
    leaves, _ = make_inputs((1, 1, 3, 8, 2))
    with pytest.raises(FathomsError, match="no implementation is called 'absorb'; did you mean 'absorbed'"):
        class_attention(*leaves, impl="absorb")


@pytest.mark.compile
def test_it_compiles_whole_maps_over_a_batch_and_exports():
    leaves, grad = make_inputs((3, 2, 9, 32, 2), dtype=torch.float32)
    compiled = torch.compile(absorbed, fullgraph=True, backend="aot_eager")
    eager = outcome(absorbed, leaves, grad)
    assert all(error < 1e-5 for error in errors(outcome(compiled, leaves, grad), eager).values())
    images = [x.detach()[:, None] for x in leaves[:3]]
    many = torch.vmap(lambda *x: absorbed(*x, *leaves[3:]))(*images)
    assert torch.allclose(many[:, 0], eager["out"], atol=1e-5)
    layer = ClassAttention(32, 2)
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        layer, tuple(leaves[1:3]), dynamic_shapes={"queries": {0: batch}, "context": {0: batch}}
    )
    other, _ = make_inputs((5, 2, 9, 32, 2), dtype=torch.float32)
    assert torch.allclose(program.module()(*other[1:3]), layer(*other[1:3]), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_it_errs_no_more_than_the_plain_form(name, dtype, compiled):
    shape, size, biases = CASES[name]
    leaves, grad = make_inputs(shape, size, biases, dtype, "cuda")
    exact = exact_outcome(leaves, grad)
    # Each case is compiled for itself: one function may only be compiled a few times over.
    torch.compiler.reset()
    form = torch.compile(absorbed, fullgraph=True) if compiled else absorbed
    results = outcome(form, leaves, grad)
    assert all(value.dtype == dtype for value in results.values())
    own, plain = errors(results, exact), errors(outcome(class_attention_reference, leaves, grad), exact)
    # In float32 both are near its rounding, where either may be the luckier one.
    slack = 1e-5 if dtype == torch.float32 else 0.0
    assert all(own[key] <= 1.2 * plain[key] + slack for key in own), (own, plain)
