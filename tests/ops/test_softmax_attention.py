"""Softmax attention: torch's, without the kernel whose gradient is wrong."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fathoms.ops.attention_ops import attend, leave_out_cudnn_attention


@pytest.fixture(autouse=True)
def _cudnn_attention_restored():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("keys", [64, 65])
def test_it_is_torch_s_attention(keys):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 8)
    assert torch.equal(attend(q, k, v), F.scaled_dot_product_attention(q, k, v))


class Pretended(torch.Tensor):
    """On a CPU, and says that it is not."""

    is_cuda = True


def switched_on():
    cuda = torch.backends.cuda
    names = ("cudnn", "flash", "mem_efficient", "math")
    return {name for name in names if getattr(cuda, f"{name}_sdp_enabled")()}


@pytest.mark.parametrize(
    ("allowed", "keys", "expected"),
    [
        (None, 64, {"flash", "mem_efficient", "math"}),
        (None, 65, {"cudnn", "flash", "mem_efficient", "math"}),
        # Mathematics alone, for gradients of second order: what a user has switched off stays off.
        ([SDPBackend.MATH], 64, {"math"}),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], 64, {"flash"}),
    ],
)
def test_the_kernel_that_is_wrong_and_no_other_is_switched_off(monkeypatch, allowed, keys, expected):
    seen = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *_: seen.append(switched_on()) or q)
    x = torch.zeros(1, 1, keys, 8).as_subclass(Pretended)
    before = switched_on()
    with contextlib.nullcontext() if allowed is None else sdpa_kernel(allowed):
        attend(x, x, x)
    assert seen == [expected]
    assert switched_on() == before


def test_a_process_can_be_kept_off_it():
    torch.backends.cuda.enable_cudnn_sdp(True)
    leave_out_cudnn_attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("before", [True, False])
def test_as_a_context_it_gives_the_switch_back(before):
    torch.backends.cuda.enable_cudnn_sdp(before)
    with leave_out_cudnn_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (192, 192), (1, 128)])
def test_low_logits_have_a_finite_gradient(queries, keys, compiled):
    torch.manual_seed(0)
    shapes = ((2, 2, queries, 64), (2, 2, keys, 64), (2, 2, keys, 64))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.1 for shape in shapes)
    # One channel makes every logit about -120, below the logarithm of float32's range.
    q[..., 0], k[..., 0] = 1.0, -120 * 8.0
    inputs = [x.requires_grad_() for x in (q, k, v)]
    run = torch.compile(attend) if compiled else attend
    run(*inputs).square().mean().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
