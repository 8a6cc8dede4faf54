"""Talking-heads attention: the reference against float64, the kernels against the reference.

Without a GPU the kernels run in Triton's interpreter. It must be switched on before triton is imported, so this
file is started again as a script, and the tests read the numbers that it prints.
"""

from __future__ import annotations

import functools
import json

import pytest
import torch

from fathoms.errors import BackendError, ShapeError, UnknownNameError
from fathoms.ops import talking_heads as op
from fathoms.ops.talking_heads import talking_heads, talking_heads_reference, why_not_fused

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
    # Every logit is about -120: beside them that of a key that does not exist, zero, would be beyond float32.
    "low_logits": ((1, 2, 17, 16), "float32", 1.0, "low", True),
    "even_tokens": ((1, 4, 16, 16), "float32", 0.25, "packed", True),
    "float16": ((1, 5, 17, 32), "float16", 0.2, "packed", True),
    "bfloat16": ((1, 8, 18, 48), "bfloat16", 48**-0.5, "packed", True),
    "twelve_heads": ((1, 12, 17, 16), "bfloat16", 0.25, "packed", True),
    # More tokens than any tile has, so that what was summed over one tile goes on in the next.
    "many_tiles": ((1, 2, 70, 8), "float32", 1.5, "packed", True),
    "many_tiles_float16": ((1, 2, 70, 16), "float16", 0.25, "packed", True),
    "one_token": ((2, 3, 1, 5), "float32", 0.25, "packed", True),
    "no_images": ((0, 2, 5, 8), "float32", 0.25, "packed", True),
    "no_tokens": ((2, 2, 0, 8), "float32", 0.25, "packed", True),
    "no_channels": ((2, 2, 5, 0), "float32", 0.25, "contiguous", True),
}
MANY_HEADS = (33,)
# Tokens of which both images are mixed together, ending at a whole tile or amid one, and that fill a tile of keys.
SPOILED = (4, 5, 16)
# float32: rounding of sums over N and K. float16: its own rounding. bfloat16: the interpreter truncates where the
# device rounds, which doubles the error of the unfused form (the device test compares with that form instead).
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


def errors_of(shape, dtype, scale, layout="packed", biases=True):
    """Relative errors against float64, and whether everything has the dtype of the inputs."""
    leaves = make_inputs(shape, dtype, layout, biases)
    fused = run(talking_heads, leaves, scale=scale, impl="triton")
    exact = run(talking_heads_reference, doubled(leaves), scale=scale)
    same = all(fused[key].dtype == dtype for key in fused)
    return {"errors": relative_errors(fused, exact), "same_dtype": same}


def alone(attend, leaves):
    """How far each gradient is off where nothing else asks for one."""
    together = run(attend, leaves)
    differences = []
    for place, name in enumerate(NAMES):
        only = [x.detach().requires_grad_(place == index) for index, x in enumerate(leaves)]
        differences.append((run(attend, only)[name] - together[name]).abs().max().item())
    return differences


def second_order(attend, leaves):
    """What is said to whoever asks for the gradient of a gradient."""
    (grad,) = torch.autograd.grad(attend(*leaves).square().sum(), leaves[0], create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def spoiled(tokens):
    """Which images have a NaN among their answers and in the gradient of q, where the last query of the first has."""
    leaves = make_inputs((2, 4, tokens, 16), torch.float32)
    with torch.no_grad():
        leaves[0][0, 1, -1, 2] = float("nan")
    found = run(talking_heads, leaves, scale=0.25, impl="triton")
    return [found[name].isnan().flatten(1).any(1).tolist() for name in ("out", "q")]


def by_function(leaves):
    """How far gradients by torch.func, which "auto" leaves to the reference, are off; what a kernel says of them."""
    q, *others = (x.detach() for x in leaves)
    attend = functools.partial(talking_heads, scale=0.25)
    found = torch.func.grad(lambda q: attend(q, *others).square().sum())(q)
    leaves[0].grad = None
    attend(leaves[0], *others).square().sum().backward()
    try:
        torch.func.grad(lambda q: attend(q, *others, impl="triton").sum())(q)
    except BackendError as error:
        return (found - leaves[0].grad).abs().max().item(), str(error)
    return "nothing"


def interpreted():
    """Run every case through the kernels, in this process, and the checks of the custom op."""
    from fathoms.ops.triton import talking_heads as kernel

    # Two images at a time at most, so that batches are worked on in parts.
    kernel.SCRATCH = 2 * 3 * 13 * 16 * 4
    # New tensors are full of NaN, so that a number that nobody wrote shows.
    torch.use_deterministic_algorithms(True)
    report = {
        name: errors_of(shape, getattr(torch, dtype), *form) for name, (shape, dtype, *form) in CASES.items()
    }
    report["many_heads"] = {count: errors_of((1, count, 9, 8), torch.float32, 0.25) for count in MANY_HEADS}
    torch.use_deterministic_algorithms(False)
    report["by_function"] = by_function(make_inputs((1, 2, 9, 16), torch.float32))
    leaves = make_inputs((1, 2, 9, 16), torch.float32)
    q, k, v, logit_weight, _, prob_weight, bias = (x.detach() for x in leaves)
    given = (torch.ones_like(q), q, k, v, logit_weight.T, prob_weight.T, bias)
    report["opcheck"] = {
        "forward": torch.library.opcheck(kernel.talking_heads_forward, (*leaves, 0.25)),
        "backward": torch.library.opcheck(kernel.talking_heads_backward, (*given, 0.25)),
    }
    attend = functools.partial(talking_heads, scale=0.25, impl="triton")
    report["spoiled"] = {tokens: spoiled(tokens) for tokens in SPOILED}
    report["alone"] = alone(attend, leaves)
    report["second_order"] = second_order(attend, leaves)
    eager = run(attend, leaves)
    compiled = run(torch.compile(attend, fullgraph=True, backend="aot_eager"), leaves)
    report["compiled"] = relative_errors(compiled, eager)
    print(json.dumps(report))


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_match_float64(report, name):
    # Logits of hundreds leave differences of nearly equal numbers: float32 itself keeps only four digits of those, and
    # of the saved log-sum-exp of low ones, which are all multiplied by -120 in the gradient of their matrix, three.
    tolerance = {"large_logits": 1e-3, "low_logits": 5e-3}.get(name, TOLERANCE[CASES[name][1]])
    errors = report[name]["errors"]
    assert all(error < tolerance for error in errors.values()), errors


@pytest.mark.parametrize("name", CASES)
def test_gradients_keep_the_dtype(report, name):
    assert report[name]["same_dtype"]


@pytest.mark.parametrize("heads", MANY_HEADS)
def test_interpreted_stages_take_many_heads(report, heads):
    errors = report["many_heads"][str(heads)]["errors"]
    assert all(error < TOLERANCE["float32"] for error in errors.values()), errors


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_custom_ops_pass_opcheck(report, part):
    """The backward pass with transposed weights: what is told to torch.compile must have the real strides."""
    assert set(report["opcheck"][part].values()) == {"SUCCESS"}


@pytest.mark.parametrize("tokens", SPOILED)
def test_a_nan_shows_in_its_own_image_and_in_no_other(report, tokens):
    assert report["spoiled"][str(tokens)] == [[True, False], [True, False]]


def test_gradients_by_function_are_those_of_the_reference(report):
    error, said = report["by_function"]
    assert error < 1e-5
    assert "torch.func needs a derivative" in said


def test_a_gradient_does_not_depend_on_who_else_asks_for_one(report):
    assert report["alone"] == [0.0] * len(NAMES)


def test_gradients_of_second_order_are_refused(report):
    assert "no autograd formula was registered" in report["second_order"]


@pytest.mark.compile
def test_compile_sees_through_the_custom_op(report):
    assert all(error < 1e-6 for error in report["compiled"].values())


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


def test_kernel_on_cpu_is_refused_with_the_reason():
    leaves = make_inputs((1, 2, 5, 8), torch.float32)
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
def test_device_kernels_are_as_exact_as_the_unfused_form(shape, dtype):
    scale = shape[3] ** -0.5
    leaves = make_inputs(shape, dtype, device="cuda")
    exact = run(talking_heads_reference, doubled(leaves), scale=scale)
    fused = relative_errors(run(talking_heads, leaves, scale=scale, impl="triton"), exact)
    plain = relative_errors(run(talking_heads_reference, leaves, scale=scale), exact)
    # The bias gradient is rounded once, at the end, in both forms: luck decides which one is nearer.
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


if __name__ == "__main__":
    interpreted()
