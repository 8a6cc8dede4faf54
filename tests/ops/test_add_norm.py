"""A join with the norm behind it: the reference against the parts it stands for, the kernels against float64.

Without a GPU the kernels run in Triton's interpreter. It must be switched on before triton is imported, so this
file is started again as a script, and the tests read the numbers that it prints.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fathoms.errors import BackendError, ShapeError
from fathoms.ops.add_norm import add_norm, add_norm_reference
from fathoms.parts.norm import NORMS
from fathoms.parts.residual import RESIDUALS

# torch says this once, in the thread that runs the first backward pass of a process on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")

KINDS = ("layernorm", "rmsnorm", "scalenorm", "learnable_scaler", "dyt", "derf")
SCALES = {"none": "none", "channel": "layerscale", "scalar": "rezero"}
# name: kind, scale, shape, dtypes of stream and branch, layout
CASES = {
    **{f"{k}_{scale}": (k, scale, (3, 5, 100), "float32", "float32", "plain") for k in KINDS for scale in SCALES},
    "layernorm_192": ("layernorm", "channel", (2, 9, 192), "bfloat16", "bfloat16", "plain"),
    "layernorm_768": ("layernorm", "channel", (1, 5, 768), "float16", "float16", "plain"),
    "rmsnorm_bfloat16": ("rmsnorm", "scalar", (2, 7, 48), "bfloat16", "bfloat16", "plain"),
    "derf_bfloat16": ("derf", "channel", (2, 7, 192), "bfloat16", "bfloat16", "plain"),
    "wide_stream": ("layernorm", "channel", (2, 5, 64), "float32", "bfloat16", "plain"),
    "wide_stream_unscaled": ("learnable_scaler", "none", (2, 5, 64), "float32", "bfloat16", "plain"),
    "slices_of_tokens": ("layernorm", "channel", (2, 6, 40), "float32", "float32", "sliced"),
    "strided_channels": ("dyt", "channel", (2, 6, 40), "float32", "float32", "turned"),
    "bare": ("layernorm", "bare", (4, 3, 33), "float32", "float32", "plain"),
    "short_tokens": ("scalenorm", "channel", (2, 4, 24), "float32", "float32", "short"),
    "one_token": ("rmsnorm", "channel", (1, 1, 1), "float32", "float32", "plain"),
}  # fmt: skip
# float32: rounding of sums over tokens and channels. float16: its own rounding. bfloat16: the interpreter truncates
# where the device rounds, which doubles the error of the unfused form.
TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}


def parameters_of(kind, scale, dim):
    """The join's own parameters as its parts hold them, moved off their start."""
    norm, residual = NORMS.build(kind, dim), RESIDUALS.build(SCALES[scale], dim)
    given = {
        "scale": getattr(residual, "gamma", getattr(residual, "alpha", None)),
        "weight": getattr(norm, "weight", getattr(norm, "g", getattr(norm, "a", None))),
        "bias": getattr(norm, "bias", getattr(norm, "b", None)),
        "alpha": getattr(norm, "alpha", None),
        "shift": getattr(norm, "shift", None),
    }
    with torch.no_grad():
        for value in (p for p in given.values() if p is not None):
            value.add_(0.5 * torch.randn_like(value))
    return norm, residual, given


def make_inputs(kind, scale, shape, stream="float32", branch="float32", layout="plain", device="cpu"):
    """Leaves by name."""
    torch.manual_seed(0)
    sizes = {"sliced": (shape[0], shape[1] + 3, shape[2]), "turned": (shape[0], shape[2], shape[1])}
    leaves = {}
    for name, dtype in (("x", stream), ("branch", branch)):
        value = torch.randn(sizes.get(layout, shape)).to(getattr(torch, dtype))
        value = {"sliced": lambda v: v[:, 3:], "turned": lambda v: v.mT}.get(layout, lambda v: v)(value)
        if layout == "short":
            value[:, ::2] *= 1e-5
        leaves[name] = value
    bare = scale == "bare"
    given = parameters_of(kind, "none" if bare else scale, shape[-1])[2]
    leaves |= {name: None if bare or p is None else p.detach() for name, p in given.items()}
    return {name: None if v is None else v.to(device).requires_grad_() for name, v in leaves.items()}


def run(function, leaves):
    """Outputs and gradients by name."""
    for leaf in leaves.values():
        if leaf is not None:
            leaf.grad = None
    stream, normed = function(**leaves)
    torch.manual_seed(1)
    torch.autograd.backward([stream, normed], [torch.randn(stream.shape).to(stream) for _ in range(2)])
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}
    return {"stream": stream.detach(), "normed": normed.detach(), **gradients}


def doubled(leaves):
    return {name: None if v is None else v.detach().double().requires_grad_() for name, v in leaves.items()}


def relative_errors(results, exact):
    return {name: ((results[name].double() - v).norm() / v.norm()).item() for name, v in exact.items()}


def options(kind):
    return {"kind": kind, "eps": 1e-3 if kind == "scalenorm" else 1e-6}


def interpreted():
    """Run every case through the kernels, in this process, and the checks of the custom op."""
    from fathoms.ops.triton.add_norm import add_norm_forward

    report = {}
    for name, (kind, scale, shape, stream, branch, layout) in CASES.items():
        leaves = make_inputs(kind, scale, shape, stream, branch, layout)
        fused = run(functools.partial(add_norm, impl="triton", **options(kind)), leaves)
        exact = run(functools.partial(add_norm_reference, **options(kind)), doubled(leaves))
        same = all(leaf.grad.dtype == leaf.dtype for leaf in leaves.values() if leaf is not None)
        report[name] = {"errors": relative_errors(fused, exact), "same_dtype": same}
    leaves = make_inputs("derf", "channel", (2, 3, 8))
    checked = [p.detach().expand(8).clone().requires_grad_() if p.dim() == 1 else p for p in leaves.values()]
    report["opcheck"] = torch.library.opcheck(add_norm_forward, (*checked, "derf", 1e-6))
    join = functools.partial(add_norm, impl="triton", **options("layernorm"))
    leaves = make_inputs("layernorm", "scalar", (2, 3, 8))
    compiled = run(torch.compile(join, fullgraph=True, backend="aot_eager"), leaves)
    report["compiled"] = max(relative_errors(compiled, run(join, leaves)).values())
    stream, normed = join(**leaves)
    alone = torch.autograd.grad(normed.sum(), leaves["x"])[0]
    both = torch.autograd.grad(
        sum(o.sum() * w for o, w in zip(join(**leaves), (0, 1), strict=True)), leaves["x"]
    )[0]
    report["unread_stream"] = (alone - both).abs().max().item()
    print(json.dumps(report))


@pytest.fixture(scope="module")
def report():
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_match_float64(report, name):
    _, _, _, stream, branch, _ = CASES[name]
    errors = report[name]["errors"]
    assert max(errors.values()) < max(TOLERANCE[stream], TOLERANCE[branch]), errors


@pytest.mark.parametrize("name", CASES)
def test_gradients_keep_the_dtype(report, name):
    assert report[name]["same_dtype"]


def test_custom_op_passes_opcheck(report):
    assert set(report["opcheck"].values()) == {"SUCCESS"}


@pytest.mark.compile
def test_compile_sees_through_the_custom_op(report):
    assert report["compiled"] < 1e-6


def test_a_stream_that_nobody_reads_has_no_gradient(report):
    assert report["unread_stream"] < 1e-6


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_what_the_parts_do(kind, scale):
    torch.manual_seed(0)
    norm, residual, given = parameters_of(kind, scale, 24)
    x, branch = torch.randn(2, 2, 5, 24).unbind(0)
    stream, normed = add_norm(x, branch, **given, kind=kind, eps=getattr(norm, "eps", 1e-6), impl="reference")
    joined = x + residual(branch)
    torch.testing.assert_close(stream, joined)
    torch.testing.assert_close(normed, norm(joined))


def test_kernel_on_cpu_is_refused_with_the_reason():
    x = torch.randn(2, 3, 8)
    with pytest.raises(BackendError, match=r'add_norm: impl="triton" cannot run: .*; use impl="auto"'):
        add_norm(x, x, None, None, None, kind="layernorm", impl="triton")


@pytest.mark.plain
def test_wrong_shapes_are_refused():
    x = torch.randn(2, 3, 8)
    with pytest.raises(ShapeError, match=r"scale is \(7,\); give \(8,\) or \(1,\)"):
        add_norm(x, x, torch.ones(7), None, None, kind="layernorm")
    with pytest.raises(ShapeError, match="give one shape"):
        add_norm(x, x[:, :1], None, None, None, kind="layernorm")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", SCALES)
def test_device_kernels_are_as_exact_as_the_unfused_form(kind, scale):
    leaves = make_inputs(kind, scale, (5, 197, 192), "bfloat16", "bfloat16", device="cuda")
    exact = run(functools.partial(add_norm_reference, **options(kind)), doubled(leaves))
    plain = run(functools.partial(add_norm_reference, **options(kind)), leaves)
    join = functools.partial(add_norm, impl="triton", **options(kind))
    fused, again = run(join, leaves), run(join, leaves)
    assert all(torch.equal(fused[name], again[name]) for name in fused)
    ours, theirs = relative_errors(fused, exact), relative_errors(plain, exact)
    for name, error in ours.items():
        assert error < max(1.2 * theirs[name], 1e-5), (name, error, theirs[name])


if __name__ == "__main__":
    interpreted()
