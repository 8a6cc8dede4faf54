"""x + gamma * branch in one pass: the numbers and gradients of the plain form."""

from __future__ import annotations

import pytest
import torch

from fathoms.ops.scale_add import scale_add, scale_add_reference


def inputs(dtype=torch.float64, scale_dtype=None):
    generator = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(2, 5, 6, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    gamma = torch.randn(6, generator=generator).to(scale_dtype or dtype).requires_grad_()
    return x, gamma, branch


def test_gradients_of_first_and_second_order():
    assert torch.autograd.gradcheck(scale_add, inputs())
    assert torch.autograd.gradgradcheck(scale_add, inputs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_gradients_and_dtypes_are_those_of_the_plain_form(dtype, scale_dtype):
    """One rounding less: float32 to its rounding, bfloat16 to 2^-7 of the largest value."""
    given, plain = inputs(dtype, scale_dtype), inputs(dtype, scale_dtype)
    out, expected = scale_add(*given), scale_add_reference(*plain)
    assert out.dtype == expected.dtype
    out.square().sum().backward()
    expected.square().sum().backward()
    rounding = 1e-6 if dtype == scale_dtype == torch.float32 else 2**-7
    for own, other in [(out, expected), *[(a.grad, b.grad) for a, b in zip(given, plain, strict=True)]]:
        assert own.dtype == other.dtype
        assert (own - other).abs().max() <= rounding * other.abs().max()


def test_under_autocast_the_stream_keeps_its_dtype():
    x, gamma, branch = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = branch.detach().bfloat16()
        assert scale_add(x, gamma, half).dtype == scale_add_reference(x, gamma, half).dtype


def test_only_what_asks_for_a_gradient_gets_one():
    x, gamma, branch = inputs(torch.float32)
    scale_add(x.detach(), gamma, branch.detach()).sum().backward()
    assert gamma.grad is not None
    assert x.grad is None
    with torch.no_grad():
        assert not scale_add(x, gamma, branch).requires_grad


# torch says this of its own derivatives, when the first is asked for.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_has_the_derivative_of_the_plain_form():
    x, gamma, branch = inputs(torch.float64)
    ours, plain = (
        torch.func.jvp(lambda branch, form=form: form(x, gamma, branch), (branch.detach(),), (x.detach(),))
        for form in (scale_add, scale_add_reference)
    )
    assert torch.allclose(ours[1], plain[1])


@pytest.mark.compile
def test_it_compiles_whole_and_maps_over_a_batch():
    x, gamma, branch = inputs(torch.float32)
    compiled = torch.compile(scale_add, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, gamma, branch), scale_add(x, gamma, branch))
    many = torch.vmap(scale_add, in_dims=(0, None, 0))(x, gamma, branch)
    assert torch.allclose(many, scale_add_reference(x, gamma, branch))
