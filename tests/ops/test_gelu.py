"""gelu(x + bias): the reference against float64, the kernels against both."""

from __future__ import annotations

import math

import pytest
import torch

from fathoms.errors import BackendError, ShapeError
from fathoms.ops.gelu import bias_gelu, bias_gelu_reference, why_not_fused

# name: shape of x, dtype of x, dtype of the bias (None: no bias), layout of x and of the gradient
CASES = {
    "one_row": ((37,), "float32", "float32", "contiguous"),
    "one_number": ((1, 1), "float32", "float32", "contiguous"),
    "odd_sizes": ((2, 3, 5, 131), "float32", "float32", "contiguous"),
    "many_strips_and_tiles": ((531, 301), "float32", "float32", "contiguous"),
    "whole_tiles": ((256, 128), "float32", "float32", "contiguous"),
    "no_bias": ((150, 33), "float32", None, "contiguous"),
    "strided": ((3, 50, 48), "float32", "float32", "strided"),
    "float16": ((40, 3, 96), "float16", "float16", "contiguous"),
    "bfloat16": ((40, 3, 96), "bfloat16", "bfloat16", "strided"),
    "bias_of_its_own_dtype": ((140, 65), "float16", "float32", "contiguous"),
    "bias_in_double": ((9, 17), "float32", "float64", "contiguous"),
    "no_rows": ((2, 0, 16), "float32", "float32", "contiguous"),
    "no_channels": ((3, 0), "float32", "float32", "contiguous"),
}
# Rounding of the type, of sums over rows in float32; the interpreter truncates to bfloat16 where the device rounds.
TOLERANCE = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 6e-3}
EDGES = (-40.0, -13.0, -1e-30, -0.0, 0.0, 1e-30, 13.0, 40.0)


def make_inputs(shape, dtype, bias_dtype, layout="contiguous", device="cpu"):
    """Random x, bias and gradient of the output; x spreads well into both tails."""
    torch.manual_seed(0)
    x, grad = (scale * torch.randn(shape, device=device) for scale in (2.0, 1.0))
    bias = None if bias_dtype is None else torch.randn(shape[-1], device=device).to(bias_dtype)
    x, grad = x.to(dtype), grad.to(dtype)
    if layout == "strided":
        x, grad = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, grad))
    return x, bias, grad


def run(function, x, bias, grad, **options):
    """Output and gradients by name."""
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    out = function(x, bias, **options)
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad} | ({} if bias is None else {"bias": bias.grad})


def run_exact(x, bias, grad):
    return run(bias_gelu_reference, x.double(), None if bias is None else bias.double(), grad.double())


def relative_errors(results, exact):
    """Norm of the difference over norm of the truth, or the norm where the truth is zero."""
    return {
        name: ((results[name].double() - value).norm() / (value.norm() if value.any() else 1.0)).item()
        for name, value in exact.items()
    }


def grid():
    """Numbers from -40 to 40, dense where something happens, and the edges, as rows of 512."""
    parts = [torch.linspace(-40, 40, 100_348), torch.linspace(-6, 6, 100_348), torch.tensor(EDGES)]
    return torch.cat(parts).view(-1, 512)


def grid_errors(x):
    """Largest errors of Φ, by itself and relative to it in the lower tail, and of the derivative."""
    found = run(bias_gelu, x, None, torch.ones_like(x), impl="triton")
    u = x.double()
    phi = torch.special.erfc(-u * 0.5**0.5) / 2
    slope = phi + u * torch.exp(-u * u / 2) / (2 * math.pi) ** 0.5
    output = (found["out"].double() - u * phi).abs()
    tail = (u < -1) & (u > -12)
    return {
        "phi": (output / u.abs().clamp_min(1.0)).max().item(),
        "tail": (output / (u * phi).abs())[tail].max().item(),
        "x": (found["x"].double() - slope).abs().max().item(),
        "finite": bool(found["out"].isfinite().all() and found["x"].isfinite().all()),
        "zero": found["out"][x == 0].abs().sum().item(),
    }


def inputs_of(name, device):
    shape, dtype, bias_dtype, layout = CASES[name]
    bias_dtype = None if bias_dtype is None else getattr(torch, bias_dtype)
    return make_inputs(shape, getattr(torch, dtype), bias_dtype, layout, device)


@pytest.mark.kernels
@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_match_float64(device, name):
    given = inputs_of(name, device)
    errors = relative_errors(run(bias_gelu, *given, impl="triton"), run_exact(*given))
    assert all(error < TOLERANCE[CASES[name][1]] for error in errors.values()), errors


@pytest.mark.kernels
@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("name", CASES)
def test_gradients_keep_shape_and_dtype_and_come_out_the_same_again(device, name):
    given = inputs_of(name, device)
    found, again = (run(bias_gelu, *given, impl="triton") for _ in range(2))
    for key, plain in run(bias_gelu_reference, *given).items():
        assert (found[key].dtype, found[key].shape) == (plain.dtype, plain.shape)
        assert torch.equal(found[key], again[key])


@pytest.mark.kernels
def test_the_kernels_are_exact_from_one_tail_to_the_other(device):
    check_grid(grid_errors(grid().to(device)))


def check_grid(errors):
    """As the docstring of `bias_gelu` says: Φ to 3e-7, and to 2e-5 of itself in the lower tail."""
    assert errors["phi"] < 3e-7, errors
    # Φ and u φ are added: twice the error of one.
    assert errors["x"] < 6e-7, errors
    assert errors["tail"] < 2e-5, errors
    assert errors["finite"]
    assert errors["zero"] == 0


@pytest.mark.kernels
# numpy warns of it in the interpreter.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_numbers_that_are_not_finite_do_not_come_out_finite(device):
    broken = torch.tensor([[math.nan], [math.inf], [-math.inf]], device=device)
    found = run(bias_gelu, broken, None, torch.ones_like(broken), impl="triton")
    assert not found["out"].isfinite().any()
    assert not found["x"].isfinite().any()


@pytest.mark.kernels
def test_bfloat16_is_as_exact_as_the_reference(device):
    """Computed in float32 and rounded by torch, as a GPU does; the interpreter truncates."""
    given = make_inputs((300, 130), torch.bfloat16, torch.bfloat16, device=device)
    exact = run_exact(*given)
    wide = run(bias_gelu, *(tensor.float() for tensor in given), impl="triton")
    found = relative_errors({name: value.bfloat16() for name, value in wide.items()}, exact)
    plain = relative_errors(run(bias_gelu_reference, *given), exact)
    for name, error in found.items():
        assert error < allowed(name, plain[name], torch.bfloat16), (name, error)


def allowed(name, plain, dtype):
    """A fifth more than the reference; the bias's gradient is rounded once, at the end, in both: luck decides."""
    once = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    return max(1.2 * plain, once if name == "bias" else 1e-6)


@pytest.mark.kernels
# opcheck reads the gradient of a view.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_custom_ops_pass_opcheck(device):
    from fathoms.ops.triton_gelu import gelu_backward, gelu_forward

    x, bias, grad = make_inputs((3, 5, 17), torch.float32, torch.float32, device=device)
    x, bias = x.requires_grad_(), bias.requires_grad_()
    for op, given in (
        (gelu_forward, (x, bias)),
        (gelu_forward, (x.transpose(0, 1), None)),
        (gelu_backward, (grad, x.detach(), bias.detach())),
    ):
        assert set(torch.library.opcheck(op, given).values()) == {"SUCCESS"}


@pytest.mark.kernels
@pytest.mark.compile
def test_compile_sees_through_the_custom_op(device):
    given = make_inputs((3, 5, 17), torch.float32, torch.float32, device=device)
    compiled = torch.compile(
        lambda *leaves: bias_gelu(*leaves, impl="triton"), fullgraph=True, backend="aot_eager"
    )
    eager, found = run(bias_gelu, *given, impl="triton"), run(compiled, *given)
    assert all(torch.equal(found[name], value) for name, value in eager.items())


def test_reference_passes_gradcheck():
    x, bias, _ = make_inputs((2, 3, 5), torch.float64, torch.float64)
    assert torch.autograd.gradcheck(bias_gelu_reference, (x.requires_grad_(), bias.requires_grad_()))


def test_output_keeps_the_dtype_of_x_whatever_the_bias():
    x, bias, _ = make_inputs((3, 8), torch.bfloat16, torch.float32)
    assert bias_gelu(x, bias).dtype == torch.bfloat16
    assert bias_gelu(x.double(), None).dtype == torch.float64


def test_a_kernel_that_cannot_run_is_refused_with_the_reason():
    x, bias, _ = make_inputs((3, 8), torch.float64, torch.float32)
    with pytest.raises(BackendError, match=r'bias_gelu: impl="triton" cannot run: .*; use impl="auto"'):
        bias_gelu(x, bias, impl="triton")
    assert why_not_fused(x) is not None


@pytest.mark.plain
def test_wrong_shapes_are_refused():
    x, bias, _ = make_inputs((3, 8), torch.float32, torch.float32)
    with pytest.raises(ShapeError, match=r"bias_gelu: bias is \(7,\); give \(8,\), the channels of x"):
        bias_gelu(x, bias[1:])
    with pytest.raises(ShapeError, match=r"bias_gelu: bias is \(1, 8\); give \(8,\)"):
        bias_gelu(x, bias[None])
    with pytest.raises(ShapeError, match="x is a single number"):
        bias_gelu(torch.tensor(1.0), None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "shape", [(50432, 1536), (50432, 768), (36928, 1536), (64, 197, 3072), (1001, 301)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("biased", ["own", "float32", "none"])
def test_device_kernels_are_as_exact_as_the_reference(shape, dtype, biased):
    bias_dtype = {"own": dtype, "float32": torch.float32, "none": None}[biased]
    given = make_inputs(shape, dtype, bias_dtype, device="cuda")
    exact = run_exact(*given)
    fused = relative_errors(run(bias_gelu, *given, impl="triton"), exact)
    plain = relative_errors(run(bias_gelu_reference, *given), exact)
    for name, error in fused.items():
        assert error < allowed(name, plain[name], dtype), (name, error, plain[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_kernels_are_exact_from_one_tail_to_the_other():
    check_grid(grid_errors(grid().cuda()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_kernels_are_deterministic():
    given = make_inputs((50432, 768), torch.bfloat16, torch.bfloat16, device="cuda")
    once, again = (run(bias_gelu, *given, impl="triton") for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(2, 0, 16), (3, 0)], ids=str)
def test_device_kernels_take_empty_tensors(shape):
    given = make_inputs(shape, torch.bfloat16, torch.bfloat16, device="cuda")
    assert not run(bias_gelu, *given, impl="triton")["bias"].any()


@pytest.mark.gpu
@pytest.mark.compile
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_op_compiles_without_graph_breaks():
    given = make_inputs((16, 197, 384), torch.bfloat16, torch.bfloat16, device="cuda")
    compiled = run(torch.compile(bias_gelu, fullgraph=True), *given)
    eager = run(bias_gelu, *given, impl="triton")
    for name in ("out", "x"):
        assert torch.equal(compiled[name], eager[name])
    # The shares of the strips are added in another order: at most the last bit of the result differs.
    torch.testing.assert_close(compiled["bias"], eager["bias"], rtol=2**-7, atol=1e-3)
