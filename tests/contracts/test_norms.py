"""The contract of norms. A new norm gets these tests by being registered."""

from __future__ import annotations

import pytest
import torch

from fathoms.errors import ConfigError
from fathoms.parts import NORMS, LearnableScaler, LearnableScaler2d, RMSNorm, ScaleNorm
from fathoms.parts.norms import split_affine

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=list(NORMS))
def norm(request):
    torch.manual_seed(0)
    return NORMS[request.param](32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", DTYPES, ids=str)
def test_keeps_shape_and_dtype_whatever_the_weights_are(norm, dtype, weights):
    x = torch.randn(2, 5, 32, dtype=dtype)
    y = norm.to(weights)(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("shape", [(32,), (3, 32), (2, 5, 32), (2, 3, 5, 32)])
def test_takes_any_channels_last_tensor(norm, shape):
    assert norm(torch.randn(shape)).shape == shape


def test_gives_a_gradient_to_the_input_and_every_parameter(norm):
    x = torch.randn(2, 5, 32, requires_grad=True)
    (norm(x) * torch.randn(2, 5, 32)).sum().backward()
    for tensor in (x, *norm.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.any()


def test_is_a_gain_and_a_shift_of_the_rest(norm):
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(0.5 + torch.rand_like(parameter))
    x, before = torch.randn(2, 5, 32), [id(parameter) for parameter in norm.parameters()]
    rest, gain, shift = split_affine(norm)
    y = rest(x) if gain is None else gain * rest(x)
    assert torch.allclose(y if shift is None else y + shift, norm(x), rtol=1e-5, atol=1e-6)
    own = [part for part in (gain, shift) if part is not None]
    assert [id(p) for p in norm.parameters()] == before
    assert all(part is not kept for part in own for kept in rest.parameters())


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_finite_at_extremes(norm, scale, dtype):
    x = (scale * torch.randn(2, 5, 32).clamp(-3, 3)).to(dtype).requires_grad_()
    y = norm(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def test_bfloat16_stays_close_to_float64(norm):
    """One rounding of the result: 2^-8 relative to the largest value."""
    x = torch.randn(2, 5, 32).bfloat16()
    exact = norm.double()(x.double())
    rounded = norm.float()(x).double()
    assert (rounded - exact).abs().max() <= 2**-8 * exact.abs().max() + 1e-12


def test_autocast_does_not_change_the_dtype_of_the_stream(norm):
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert norm(torch.randn(2, 5, 32, dtype=dtype)).dtype == dtype


def check_autocast(norm, device, dtype, weights):
    """Under autocast a norm gives what it gives in float32, rounded once to the dtype of its input."""
    norm = norm.to(device, weights)
    x = torch.randn(2, 5, 32, device=device).to(dtype)
    grads = {}
    for name in ("autocast", "float32"):
        own = x.clone().requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=name == "autocast"):
            y = norm(own) if name == "autocast" else norm.float()(own.float()).to(dtype)
        y.float().square().sum().backward()
        grads[name] = y, own.grad
    (ours, own_grad), (exact, grad) = grads["autocast"], grads["float32"]
    assert (ours.dtype, own_grad.dtype) == (dtype, dtype)
    assert torch.equal(ours, exact)
    assert torch.allclose(own_grad.float(), grad.float(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_computes_statistics_in_float32_whatever_the_weights_are(norm, dtype, weights):
    if not hasattr(norm, "normalized_shape"):
        pytest.skip("no statistics of torch's")
    check_autocast(norm, "cpu", dtype, weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_of_a_gpu_is_the_same_under_every_torch(norm, dtype, weights):
    """Torch 2.12 moved rms_norm to the operations that CUDA's autocast runs in float32."""
    if not hasattr(norm, "normalized_shape"):
        pytest.skip("no statistics of torch's")
    check_autocast(norm, "cuda", dtype, weights)


def test_starts_anew_after_a_reset(norm):
    if not list(norm.parameters()):
        pytest.skip("this norm has no parameters")
    torch.manual_seed(1)
    norm.reset_parameters()
    first = [parameter.clone() for parameter in norm.parameters()]
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(1)
    norm.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(first, norm.parameters(), strict=True))


def test_survives_save_and_load(norm):
    twin = type(norm)(32)
    twin.load_state_dict(norm.state_dict())
    x = torch.randn(2, 5, 32)
    assert torch.equal(twin(x), norm(x))


@pytest.mark.parametrize("name", NORMS)
def test_counts_multiplications(name):
    """For each element: the square, the division, the gain; a scale inside of a curve."""
    each = {"none": 0, "learnable_scaler": 1, "dyt": 2, "derf": 2}.get(name, 3)
    assert NORMS[name](32).flop_count(10) == 10 * 32 * each
    assert split_affine(NORMS[name](32))[0].flop_count(10) == 10 * 32 * max(each - 1, 0)


@pytest.mark.compile
def test_compiles_in_one_graph(norm):
    x = torch.randn(2, 5, 32)
    assert torch.allclose(torch.compile(norm, fullgraph=True, backend="aot_eager")(x), norm(x), atol=1e-6)


def test_formulas_at_the_start():
    x = torch.randn(4, 32, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    expected = {
        "layernorm": centred / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt(),
        "rmsnorm": x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
        "scalenorm": 32**0.5 * x / x.norm(dim=-1, keepdim=True),
        "dyt": torch.tanh(0.5 * x),
        "derf": torch.erf(0.5 * x),
        "none": x,
    }
    for name, y in expected.items():
        assert torch.allclose(NORMS[name](32).double()(x), y, atol=1e-12), name


def test_scaler_keeps_its_authors_signature_names_and_init():
    scaler = LearnableScaler(10_000, eps=1e-6, affine=True)
    assert [name for name, _ in scaler.named_parameters()] == ["a", "b"]
    assert abs(scaler.a.mean()) < 0.05
    assert abs(scaler.a.std() - 1) < 0.05
    assert not scaler.b.any()
    assert LearnableScaler(8, init="ones").a.eq(1).all()
    x = torch.randn(2, 5, 10_000)
    assert torch.equal(scaler(x), scaler.a[None, None, :] * x + scaler.b[None, None, :])


def test_scaler_2d_acts_on_the_channels_of_maps():
    scaler = LearnableScaler2d(3)
    x = torch.randn(2, 3, 4, 5).bfloat16()
    y = scaler(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert torch.equal(y, (scaler.a[None, :, None, None] * x + scaler.b[None, :, None, None]).bfloat16())


def test_scaler_without_affine_is_refused():
    """The authors' class ignores the argument and learns all the same."""
    for scaler in (LearnableScaler, LearnableScaler2d):
        with pytest.raises(ConfigError, match=r"affine=False leaves nothing to learn; use nn.Identity\(\)"):
            scaler(8, affine=False)


@pytest.mark.parametrize("name", [name for name in NORMS if name != "none"])
def test_a_norm_stands_in_where_timm_builds_its_own(name):
    timm = pytest.importorskip("timm")
    options = {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 3, "norm_layer": NORMS[name]}
    for dtype in (torch.float32, torch.bfloat16):
        model = timm.create_model("vit_tiny_patch16_224", **options, dtype=dtype)
        assert isinstance(model.blocks[0].norm1, NORMS[name])
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model(torch.randn(2, 3, 32, 32, dtype=dtype)).shape == (2, 1000)


def test_no_part_is_a_scalar_that_sharding_refuses():
    for norm in (ScaleNorm(8), RMSNorm(8)):
        assert all(parameter.ndim >= 1 for parameter in norm.parameters())
