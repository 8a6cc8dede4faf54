"""Plain attention: torch's, without the kernel whose gradient is wrong."""

import pytest
import torch
import torch.nn.functional as F

from fathoms.ops import softmax
from fathoms.ops.softmax import attend, leave_out_cudnn_attention


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


def test_the_kernel_that_is_wrong_is_not_among_the_sound_ones():
    assert {backend.name for backend in softmax.SOUND} == {"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"}


def test_a_process_can_be_kept_off_it():
    torch.backends.cuda.enable_cudnn_sdp(True)
    leave_out_cudnn_attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


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
