"""V gelu(W x + b) + c: the kernel against float64 and against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from fathoms.errors import BackendError, ShapeError
from fathoms.ops import mlp as op
from fathoms.ops.mlp import gelu_mlp, gelu_mlp_reference, why_not_fused
from fathoms.parts.mlp import GeluMLP
from fathoms.surgery.accelerate.modules import FusedMLP

# name: shape of x, hidden channels, which biases there are
CASES = {
    "whole_tiles": ((128, 64), 128, "both"),
    "two_parts": ((130, 192), 192, "both"),
    "odd_sizes": ((2, 3, 5, 77), 101, "both"),
    "one_number": ((1, 1), 1, "both"),
    "widest": ((3, 256), 70, "both"),
    "no_hidden_bias": ((9, 40), 64, "last"),
    "no_last_bias": ((9, 40), 64, "first"),
    "no_bias": ((9, 40), 64, "none"),
    "no_tokens": ((2, 0, 16), 32, "both"),
    "many_rows": ((2, 67, 77), 33, "both"),
}


def make_inputs(shape, hidden, biases, dtype=torch.float16, device="cpu"):
    torch.manual_seed(0)
    options = {"dtype": dtype, "device": device}
    x = torch.randn(shape, **options)
    first, last = (
        torch.randn(rows, columns, **options) * columns**-0.5
        for rows, columns in ((hidden, shape[-1]), (shape[-1], hidden))
    )
    first_bias, last_bias = (torch.randn(size, **options) for size in (hidden, shape[-1]))
    return (
        x,
        first,
        first_bias if biases in ("both", "first") else None,
        last,
        last_bias if biases in ("both", "last") else None,
    )


def assert_errs_no_more_than_the_reference(given):
    """Norm of the difference to float64 over the norm of the truth, with a fifth to spare."""
    exact = gelu_mlp_reference(*(part if part is None else part.double() for part in given))
    size = exact.norm().clamp_min(1e-30)
    kernel, plain = (
        ((found.double() - exact).norm() / size).item()
        for found in (gelu_mlp(*given, impl="triton"), gelu_mlp_reference(*given))
    )
    assert kernel <= 1.2 * plain, (kernel, plain)


def fused_layer(dim, mlp_ratio, device, dtype=torch.float16):
    layer = FusedMLP(GeluMLP(dim, mlp_ratio).to(device, dtype)).eval()
    return layer, (layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)


@pytest.mark.kernels
@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_errs_no_more_than_the_reference(device, name):
    assert_errs_no_more_than_the_reference(make_inputs(*CASES[name], device=device))


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["two_parts", "odd_sizes"])
def test_the_kernel_takes_bfloat16(device, name):
    """Two rounding steps of bfloat16, truncated by the interpreter: 2 ** -7 each."""
    given = make_inputs(*CASES[name], torch.bfloat16, device)
    exact = gelu_mlp_reference(*(part.double() for part in given))
    found = gelu_mlp(*given, impl="triton")
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).norm() < 2**-6 * exact.norm()


@pytest.mark.kernels
@pytest.mark.usefixtures("nan_filled")
def test_layout_does_not_matter(device):
    given = make_inputs(*CASES["two_parts"], device=device)
    turned = (given[0].T.contiguous().T, given[1].T.contiguous().T, *given[2:])
    assert torch.equal(gelu_mlp(*turned, impl="triton"), gelu_mlp(*given, impl="triton"))


@pytest.mark.kernels
def test_the_custom_op_passes_opcheck(device):
    from fathoms.ops.triton.mlp import fused_gelu_mlp

    result = torch.library.opcheck(fused_gelu_mlp, make_inputs(*CASES["many_rows"], device=device))
    assert set(result.values()) == {"SUCCESS"}


@pytest.fixture
def few_tokens_pay(monkeypatch):
    """Fewer tokens are enough for "auto", since the interpreter is slow."""
    monkeypatch.setattr(op, "MIN_TOKENS", 256)


@pytest.mark.kernels
@pytest.mark.usefixtures("few_tokens_pay")
def test_a_fused_layer_runs_the_kernel_in_inference_and_its_own_forward_elsewhere(device):
    layer, weights = fused_layer(16, 1.0, device)
    many, few = (torch.randn(count, 16, device=device).half() for count in (op.MIN_TOKENS, 99))
    plain = gelu_mlp_reference(many, *weights)
    with torch.no_grad():
        assert torch.equal(layer(many), gelu_mlp(many, *weights, impl="triton"))
        assert not torch.equal(layer(many), plain)
        assert torch.equal(layer(few), gelu_mlp_reference(few, *weights))
        assert torch.equal(layer.train()(many), plain)
    # With gradients.
    assert torch.equal(layer.eval()(many), plain)


@pytest.mark.kernels
@pytest.mark.usefixtures("few_tokens_pay")
def test_an_exported_layer_does_not_need_the_kernel(device):
    layer, _ = fused_layer(16, 1.0, device)
    x = torch.randn(op.MIN_TOKENS, 16, device=device).half()
    shapes = ({0: torch.export.Dim("tokens")},)
    exported = str(torch.export.export(layer.requires_grad_(False), (x,), dynamic_shapes=shapes).graph)
    assert "aten.gelu" in exported
    assert "fathoms" not in exported


@pytest.mark.kernels
@pytest.mark.compile
@pytest.mark.usefixtures("few_tokens_pay")
def test_a_compiled_layer_runs_the_kernel_too(device):
    layer, _ = fused_layer(16, 1.0, device)
    layer.requires_grad_(False)
    x = torch.randn(op.MIN_TOKENS, 16, device=device).half()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.kernels
def test_auto_leaves_the_kernel_for_a_reason(device):
    given = make_inputs((op.MIN_TOKENS, 16), 16, "both", device=device)
    x, *weights = given
    wide = make_inputs((op.MIN_TOKENS, 257), 8, "both", device=device)
    assert why_not_fused(*given) is None
    assert why_not_fused(x[1:], *weights) == "the kernel pays from 16384 tokens on"
    wanted = weights[0].clone().requires_grad_()
    assert (
        why_not_fused(x, wanted, *weights[1:]) == "gradients are needed, for which the kernel saves nothing"
    )
    floats = [part.float() for part in given]
    assert why_not_fused(*floats) == "products are in float32, the kernel takes bfloat16 and float16"
    assert why_not_fused(x, *floats[1:]) == "x is float16, and not all weights are"
    assert why_not_fused(*wide) == "x has 257 channels, the kernel takes up to 256"
    subclass = TwoTensor(weights[0], weights[0])
    assert why_not_fused(x, subclass, *weights[1:]) == "x or a weight is more than a plain tensor"
    with forward_ad.dual_level():
        assert why_not_fused(*given) == "forward-mode derivatives are needed, which no kernel has"
    with torch.autocast(device, torch.bfloat16):
        assert why_not_fused(x.bfloat16(), *floats[1:]) is None
        doubles = [weight.double() for weight in weights]
        assert why_not_fused(x.bfloat16(), *doubles) == "x is bfloat16, and not all weights are"


def test_the_kernel_is_refused_with_the_reason():
    given = [part if part is None else part.double() for part in make_inputs(*CASES["no_bias"])]
    with pytest.raises(BackendError, match=r'gelu_mlp: impl="triton" cannot run: .*; use impl="auto"'):
        gelu_mlp(*given, impl="triton")
    assert why_not_fused(*given) is not None


@pytest.mark.plain
@pytest.mark.parametrize(("room", "channels"), [(232448, 256), (101376, 144), (1024, 0)])
def test_a_device_with_less_shared_memory_takes_fewer_channels(monkeypatch, room, channels):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(op, "device_shared_memory", lambda _: room)
    assert op._most_channels(0) == channels


@pytest.mark.plain
def test_wrong_shapes_are_refused():
    x, first, first_bias, last, last_bias = make_inputs((3, 8), 16, "both")
    with pytest.raises(ShapeError, match=r"gelu_mlp: x is \(3, 7\); give \(\*batch, 8\)"):
        gelu_mlp(x[:, 1:], first, first_bias, last, last_bias)
    with pytest.raises(ShapeError, match=r"gelu_mlp: weight is \(16, 8\); give \(8, 16\)"):
        gelu_mlp(x, first, first_bias, last.T, last_bias)
    with pytest.raises(ShapeError, match=r"gelu_mlp: hidden_bias is \(15,\); give \(16,\)"):
        gelu_mlp(x, first, first_bias[1:], last, last_bias)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*CASES, "deit_tiny"])
def test_on_a_device_the_kernel_errs_no_more_than_the_reference(name, dtype):
    case = ((256, 197, 192), 768, "both") if name == "deit_tiny" else CASES[name]
    assert_errs_no_more_than_the_reference(make_inputs(*case, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.compile
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_a_fused_layer_compiles_without_graph_breaks_and_under_autocast():
    layer, weights = fused_layer(192, 4.0, "cuda", torch.float32)
    x = torch.randn(op.MIN_TOKENS, 192, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
        assert torch.equal(layer(x), gelu_mlp(x, *weights, impl="triton"))
