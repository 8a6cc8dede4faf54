"""V gelu(W x + b) + c: the kernel against float64 and against the plain form.

Without a GPU the kernel runs in Triton's interpreter. It must be switched on before triton is imported, so this
file is started again as a script, and the tests read the numbers that it prints.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from fathoms.errors import BackendError, ShapeError
from fathoms.ops import mlp as op
from fathoms.ops.mlp import gelu_mlp, gelu_mlp_reference, why_not_fused
from fathoms.parts.mlp import GeluMLP

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
# What `why_not_fused` says in each of the cases of `reasons`.
REASONS = {
    "nothing": None,
    "autocast": None,
    "few": "the kernel pays from 16384 tokens on",
    "gradient": "a gradient is asked for, for which the kernel keeps nothing",
    "dtype": "products take float32, the kernel's bfloat16 and float16",
    "mixed": "x is float16, and not all weights are",
    "double": "x is bfloat16, and not all weights are",
    "channels": "x has 257 channels, the kernel takes up to 256",
    "subclass": "x or a weight is more than a plain tensor",
    "tangent": "a forward-mode derivative is asked for, which no kernel has",
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


def errors(given):
    """How far from float64 the kernel is, and the plain form: norm of the difference over norm of the truth."""
    exact = gelu_mlp_reference(*(part if part is None else part.double() for part in given))
    size = exact.norm().clamp_min(1e-30)
    forms = gelu_mlp(*given, impl="triton"), gelu_mlp_reference(*given)
    return [((found.double() - exact).norm() / size).item() for found in forms]


def interpreted():
    """Run every case through the kernel, in this process, and the checks of the custom op."""
    from fathoms.ops.triton.mlp import fused_gelu_mlp

    # New tensors are full of NaN, so that a number that nobody wrote shows.
    torch.use_deterministic_algorithms(True)
    report = {name: errors(make_inputs(*case)) for name, case in CASES.items()}
    given = make_inputs(*CASES["two_parts"])
    turned = (given[0].T.contiguous().T, given[1].T.contiguous().T, *given[2:])
    report["strided"] = torch.equal(gelu_mlp(*turned, impl="triton"), gelu_mlp(*given, impl="triton"))
    torch.use_deterministic_algorithms(False)
    report["opcheck"] = torch.library.opcheck(fused_gelu_mlp, make_inputs(*CASES["many_rows"]))
    report["layer"] = layer_takes_the_kernel("cpu")
    layer, x = GeluMLP(16, 1.0).half().requires_grad_(False), torch.randn(op.MIN_TOKENS, 16).half()
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    report["exported"] = str(exported.graph)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    report["compiled"] = torch.equal(compiled(x), layer(x))
    report["reasons"] = reasons()
    print(json.dumps(report))


def layer_takes_the_kernel(device):
    """Whether its output is the kernel's, bit for bit, and the plain form's for few tokens and with a gradient."""
    layer = GeluMLP(16, 1.0).to(device, torch.float16)
    weights = layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias
    many, few = (torch.randn(count, 16, device=device, dtype=torch.float16) for count in (op.MIN_TOKENS, 99))
    with torch.no_grad():
        answered = torch.equal(layer(many), gelu_mlp(many, *weights, impl="triton"))
        answered &= not torch.equal(layer(many), gelu_mlp_reference(many, *weights))
        plain = torch.equal(layer(few), gelu_mlp_reference(few, *weights))
    return answered and plain and torch.equal(layer(many), gelu_mlp_reference(many, *weights))


def reasons():
    """Why "auto" leaves the kernel, in each of the cases of REASONS."""
    given = make_inputs((op.MIN_TOKENS, 16), 16, "both")
    x, *weights = given
    found = {
        "nothing": why_not_fused(*given),
        "few": why_not_fused(x[1:], *weights),
        "gradient": why_not_fused(x, weights[0].clone().requires_grad_(), *weights[1:]),
        "dtype": why_not_fused(x.float(), *(weight.float() for weight in weights)),
        "mixed": why_not_fused(x, *(weight.float() for weight in weights)),
        "channels": why_not_fused(*make_inputs((op.MIN_TOKENS, 257), 8, "both")),
        "subclass": why_not_fused(x, TwoTensor(weights[0], weights[0]), *weights[1:]),
    }
    with forward_ad.dual_level():
        found["tangent"] = why_not_fused(*given)
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = why_not_fused(x.bfloat16(), *(weight.float() for weight in weights))
        found["double"] = why_not_fused(x.bfloat16(), *(weight.double() for weight in weights))
    return found


@pytest.mark.parametrize("name", REASONS)
def test_where_the_kernel_cannot_serve_it_is_left_for_a_reason(report, name):
    assert report["reasons"][name] == REASONS[name]


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_errs_no_more_than_the_plain_form(report, name):
    fused, plain = report[name]
    assert fused <= 1.2 * plain, (fused, plain)


def test_layout_does_not_matter(report):
    assert report["strided"]


def test_custom_op_passes_opcheck(report):
    assert set(report["opcheck"].values()) == {"SUCCESS"}


def test_the_layer_answers_through_the_kernel_and_trains_without_it(report):
    assert report["layer"]


def test_an_exported_layer_does_not_need_the_kernel(report):
    assert "aten.gelu" in report["exported"]
    assert "fathoms" not in report["exported"]


@pytest.mark.compile
def test_a_compiled_layer_takes_the_kernel_too(report):
    assert report["compiled"]


def test_kernel_is_refused_with_the_reason():
    given = make_inputs(*CASES["no_bias"])
    with pytest.raises(BackendError, match=r'gelu_mlp: impl="triton" cannot run: .*; use impl="auto"'):
        gelu_mlp(*given, impl="triton")
    assert why_not_fused(*given) is not None


@pytest.mark.plain
@pytest.mark.parametrize(("room", "channels"), [(232448, 256), (101376, 144), (1024, 0)])
def test_a_device_with_less_shared_memory_takes_fewer_channels(monkeypatch, room, channels):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(op, "device_shared_memory", lambda _: room)
    assert op._most_channels(0) == channels


@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: mlp.act.register_forward_hook(print),
        lambda mlp: setattr(mlp, "act", torch.nn.ReLU()),
        lambda mlp: setattr(mlp.fc1, "forward", lambda x: torch.zeros(*x.shape[:-1], 32)),
    ],
)
def test_a_layer_that_does_more_is_called_part_by_part(change):
    layer, x = GeluMLP(8), torch.randn(3, 8)
    change(layer)
    assert not layer._is_plain()
    assert torch.equal(layer(x), layer.fc2(layer.act(layer.fc1(x))))


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
def test_device_kernel_errs_no_more_than_the_plain_form(name, dtype):
    case = ((256, 197, 192), 768, "both") if name == "deit_tiny" else CASES[name]
    fused, plain = errors(make_inputs(*case, dtype, "cuda"))
    assert fused <= 1.2 * plain, (fused, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_the_layer_answers_through_the_kernel_and_trains_without_it():
    assert layer_takes_the_kernel("cuda")


@pytest.mark.gpu
@pytest.mark.compile
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_op_compiles_without_graph_breaks_and_under_autocast():
    layer = GeluMLP(192).cuda()
    x = torch.randn(op.MIN_TOKENS, 192, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
        weights = layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias
        assert torch.equal(layer(x), gelu_mlp(x, *weights, impl="triton"))


if __name__ == "__main__":
    interpreted()
