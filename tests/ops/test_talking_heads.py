"""Talking-heads attention: the reference and the kernels against float64."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from fathoms.errors import BackendError, ShapeError, UnknownNameError
from fathoms.ops import attention_ops as op
from fathoms.ops.attention_ops import talking_heads, talking_heads_reference, why_not_fused

# torch says this once, in the thread that runs the first backward pass of a process on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")

NAMES = ("q", "k", "v", "logit_weight", "logit_bias", "prob_weight", "prob_bias")
# name: (B, H, N, K), dtype, scale, layout of q, k, v, with biases
CASES = {
    "three_heads_odd_tokens": ((5, 3, 13, 16), "float32", 0.25, "packed", True),
    "one_head": ((2, 1, 9, 16), "float32", 0.25, "packed", True),
    "six_heads_no_bias": ((1, 6, 17, 24), "float32", 0.2, "contiguous", False),
    "strided_channels": ((1, 2, 18, 16), "float32", 0.25, "strided", True),
    "large_logits": ((1, 2, 17, 48), "float32", 30.0, "packed", True),
    # Every logit is about -120: next to them that of a key that does not exist, zero, would be beyond float32.
    "low_logits": ((1, 2, 17, 16), "float32", 1.0, "low", True),
    "even_tokens": ((1, 4, 16, 16), "float32", 0.25, "packed", True),
    "float16": ((1, 5, 17, 32), "float16", 0.2, "packed", True),
    "bfloat16": ((1, 8, 18, 48), "bfloat16", 48**-0.5, "packed", True),
    "twelve_heads": ((1, 12, 17, 16), "bfloat16", 0.25, "packed", True),
    # More tokens than any tile has, so that sums over one tile continue in the next.
    "many_tiles": ((1, 2, 70, 8), "float32", 1.5, "packed", True),
    "many_tiles_float16": ((1, 2, 70, 16), "float16", 0.25, "packed", True),
    "one_token": ((2, 3, 1, 5), "float32", 0.25, "packed", True),
    "no_images": ((0, 2, 5, 8), "float32", 0.25, "packed", True),
    "no_tokens": ((2, 2, 0, 8), "float32", 0.25, "packed", True),
    "no_channels": ((2, 2, 5, 0), "float32", 0.25, "contiguous", True),
    "many_heads": ((1, 33, 9, 8), "float32", 0.25, "packed", True),
}
# float32: rounding of sums over N and K. float16: its own rounding. bfloat16: the interpreter truncates where the
# device rounds, which doubles the error of the reference (the device test compares with that instead).
TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}


def make_inputs(shape, dtype, layout="packed", biases=True, device="cpu", seed=0):
    """Random q, k, v and weights near the identity, as leaves that need gradients."""
    torch.manual_seed(seed)
    B, H, N, K = shape
    if layout == "packed":
        qkv = torch.randn(B, N, 3, H, K, device=device).to(dtype).permute(2, 0, 3, 1, 4)
    elif layout == "strided":
        qkv = torch.randn(3, B, H, K, N, device=device).to(dtype).transpose(-2, -1)
    else:
        qkv = torch.randn(3, B, H, N, K, device=device).to(dtype)
    if layout == "low":
        qkv[0, ..., 0], qkv[1, ..., 0] = 11.0, -11.0
    weights = [torch.eye(H, device=device) + 0.3 * torch.randn(H, H, device=device) for _ in range(2)]
    bias = [torch.randn(H, device=device), 0.1 * torch.randn(H, device=device)] if biases else [None, None]
    leaves = [*qkv, weights[0], bias[0], weights[1], bias[1]]
    return [None if x is None else x.detach().to(dtype).requires_grad_() for x in leaves]


def run(function, leaves, **options):
    """Output and gradients by name."""
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
    out = function(*leaves, **options)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape).to(out))
    named = zip(NAMES, leaves, strict=True)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in named if leaf is not None}}


def doubled(leaves):
    return [None if x is None else x.detach().double().requires_grad_() for x in leaves]


def relative_errors(results, exact):
    """Norm of the difference over norm of the truth, or the norm where the truth is zero, as for the logit bias.

    Compare them one by one: Python's max may pass over a NaN.
    """
    errors = {}
    for name, value in exact.items():
        difference = (results[name].double() - value).norm().item()
        errors[name] = difference / (1.0 if name == "logit_bias" or not value.any() else value.norm().item())
    return errors


@pytest.fixture
def small_scratch(monkeypatch):
    """Room for two images at a time at most, so that batches are processed in parts."""
    kernel = importlib.import_module("fathoms.ops.triton_talking_heads")
    monkeypatch.setattr(kernel, "SCRATCH", 2 * 3 * 13 * 16 * 4)


kernels = functools.partial(talking_heads, scale=0.25, impl="triton")


@pytest.mark.kernels
@pytest.mark.usefixtures("nan_filled", "small_scratch")
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_match_float64_and_keep_the_dtype(device, name):
    shape, dtype, scale, layout, biases = CASES[name]
    leaves = make_inputs(shape, getattr(torch, dtype), layout, biases, device)
    found = run(talking_heads, leaves, scale=scale, impl="triton")
    errors = relative_errors(found, run(talking_heads_reference, doubled(leaves), scale=scale))
    # Logits of hundreds leave differences of nearly equal numbers: float32 itself keeps only four digits of those, and
    # of the saved log-sum-exp of low ones, which are all multiplied by -120 in the gradient of their matrix, three.
    tolerance = {"large_logits": 1e-3, "low_logits": 5e-3}.get(name, TOLERANCE[dtype])
    assert all(error < tolerance for error in errors.values()), errors
    assert {value.dtype for value in found.values()} == {getattr(torch, dtype)}


@pytest.mark.kernels
# opcheck reads the gradient of a view.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_custom_ops_pass_opcheck(device):
    """The backward pass with transposed weights: the fake tensors of torch.compile must have the real strides."""
    from fathoms.ops.triton_talking_heads import talking_heads_backward, talking_heads_forward

    leaves = make_inputs((1, 2, 9, 16), torch.float32, device=device)
    q, k, v, logit_weight, _, prob_weight, bias = (x.detach() for x in leaves)
    given = (torch.ones_like(q), q, k, v, logit_weight.T, prob_weight.T, bias, 0.25)
    assert set(torch.library.opcheck(talking_heads_forward, (*leaves, 0.25)).values()) == {"SUCCESS"}
    assert set(torch.library.opcheck(talking_heads_backward, given).values()) == {"SUCCESS"}


@pytest.mark.kernels
@pytest.mark.parametrize("tokens", [4, 5, 16], ids=["tile_ends", "within_a_tile", "full_tile"])
# numpy warns of it in the interpreter.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_nan_shows_in_its_own_image_and_in_no_other(device, tokens):
    """Also where queries of both images would fill one tile."""
    leaves = make_inputs((2, 4, tokens, 16), torch.float32, device=device)
    with torch.no_grad():
        leaves[0][0, 1, -1, 2] = float("nan")
    found = run(kernels, leaves)
    for name in ("out", "q"):
        assert found[name].isnan().flatten(1).any(1).tolist() == [True, False]


@pytest.mark.kernels
def test_gradients_by_torch_func_are_those_of_the_reference(device):
    leaves = make_inputs((1, 2, 9, 16), torch.float32, device=device)
    q, *others = (x.detach() for x in leaves)
    found = torch.func.grad(lambda q: talking_heads(q, *others, scale=0.25).square().sum())(q)
    talking_heads(leaves[0], *others, scale=0.25).square().sum().backward()
    torch.testing.assert_close(found, leaves[0].grad, rtol=0, atol=1e-5)
    with pytest.raises(BackendError, match="torch.func needs a derivative"):
        torch.func.grad(lambda q: kernels(q, *others).sum())(q)


@pytest.mark.kernels
@pytest.mark.parametrize("place", range(len(NAMES)), ids=NAMES)
def test_a_gradient_does_not_depend_on_which_others_are_needed(device, place):
    leaves = make_inputs((1, 2, 9, 16), torch.float32, device=device)
    together = run(kernels, leaves)
    only = [x.detach().requires_grad_(place == index) for index, x in enumerate(leaves)]
    assert torch.equal(run(kernels, only)[NAMES[place]], together[NAMES[place]])


@pytest.mark.kernels
def test_gradients_of_second_order_are_refused(device):
    leaves = make_inputs((1, 2, 9, 16), torch.float32, device=device)
    (grad,) = torch.autograd.grad(kernels(*leaves).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.sum().backward()


@pytest.mark.kernels
@pytest.mark.compile
def test_compile_sees_through_the_custom_op(device):
    leaves = make_inputs((1, 2, 9, 16), torch.float32, device=device)
    compiled = run(torch.compile(kernels, fullgraph=True, backend="aot_eager"), leaves)
    assert all(error < 1e-6 for error in relative_errors(compiled, run(kernels, leaves)).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_matches_float64(dtype):
    leaves = make_inputs((2, 4, 37, 48), dtype)
    exact = run(talking_heads_reference, doubled(leaves), scale=48**-0.5)
    errors = relative_errors(run(talking_heads, leaves, scale=48**-0.5, impl="reference"), exact)
    # bfloat16 keeps eight bits, and rounds five maps on the way to the logit weights.
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    assert all(error < tolerance for error in errors.values()), errors


def test_reference_passes_gradcheck():
    leaves = make_inputs((1, 2, 3, 4), torch.float64)
    assert torch.autograd.gradcheck(lambda *x: talking_heads_reference(*x, scale=0.5), leaves)


def test_identity_mixing_is_plain_attention():
    q, k, v, *_ = make_inputs((2, 4, 11, 8), torch.float32)
    eye = torch.eye(4)
    out = talking_heads(q, k, v, eye, None, eye, None, scale=8**-0.5)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_autocast_takes_its_dtype_as_plain_attention_does():
    leaves = make_inputs((1, 2, 5, 8), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert talking_heads(*leaves, scale=0.3).dtype == torch.bfloat16


def test_autocast_takes_all_three_in_one_dtype(monkeypatch):
    """A kernel multiplies no bfloat16 queries with float32 keys; torch's own attention casts all three."""
    seen = []

    def spy(*given, **options):
        seen.extend(given[:3])
        return talking_heads_reference(*given, **options)

    monkeypatch.setattr(op, "talking_heads_reference", spy)
    q, *others = make_inputs((1, 2, 5, 8), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        talking_heads(q.bfloat16(), *others, scale=0.3)
    assert [x.dtype for x in seen] == 3 * [torch.bfloat16]


def test_a_kernel_that_cannot_run_is_refused_with_the_reason():
    leaves = make_inputs((1, 2, 5, 8), torch.float64)
    with pytest.raises(BackendError, match=r'talking_heads: impl="triton" cannot run: .*; use impl="auto"'):
        talking_heads(*leaves, scale=0.3, impl="triton")
    assert why_not_fused(leaves[0]) is not None


@pytest.mark.plain
def test_an_unknown_implementation_is_refused_with_the_nearest_name():
    leaves = make_inputs((1, 2, 5, 8), torch.float32)
    with pytest.raises(UnknownNameError, match="talking_heads: .* 'trition'; did you mean 'triton'"):
        talking_heads(*leaves, scale=0.3, impl="trition")


@pytest.mark.plain
def test_wrong_shapes_are_refused():
    q, k, v, weight, bias, *_ = make_inputs((1, 2, 5, 8), torch.float32)
    with pytest.raises(ShapeError, match=r"prob_weight is \(3, 3\); give \(2, 2\)"):
        talking_heads(q, k, v, weight, bias, torch.eye(3), None, scale=0.3)
    with pytest.raises(ShapeError, match="three of one shape"):
        talking_heads(q, k[:, :1], v, weight, bias, weight, None, scale=0.3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(2, 8, 196, 48), (3, 6, 77, 24), (1, 3, 65, 64), (2, 4, 50, 48)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_device_kernels_are_as_exact_as_the_reference(shape, dtype):
    scale = shape[3] ** -0.5
    leaves = make_inputs(shape, dtype, device="cuda")
    exact = run(talking_heads_reference, doubled(leaves), scale=scale)
    fused = relative_errors(run(talking_heads, leaves, scale=scale, impl="triton"), exact)
    plain = relative_errors(run(talking_heads_reference, leaves, scale=scale), exact)
    # The bias gradient is rounded once, at the end, in both: luck decides which one is nearer.
    once = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for name, error in fused.items():
        assert error < max(1.2 * plain[name], once if name == "prob_bias" else 1e-5), (
            name,
            error,
            plain[name],
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_kernels_are_deterministic():
    leaves = make_inputs((4, 8, 196, 48), torch.bfloat16, device="cuda")
    once = run(talking_heads, leaves, scale=0.1, impl="triton")
    again = run(talking_heads, leaves, scale=0.1, impl="triton")
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.gpu
@pytest.mark.compile
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_op_compiles_without_graph_breaks():
    leaves = make_inputs((2, 4, 50, 48), torch.bfloat16, device="cuda")
    compiled = torch.compile(lambda *x: talking_heads(*x, scale=0.1, impl="auto"), fullgraph=True)
    eager = run(talking_heads, leaves, scale=0.1, impl="triton")
    assert all(torch.equal(run(compiled, leaves)[name], eager[name]) for name in eager)
