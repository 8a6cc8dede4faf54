"""What a process does before it trains: take its device, and stay off kernels that are known to be wrong."""

import pytest
import torch

from fathoms.parts import SelfAttention
from fathoms.train.distributed import choose_device, leave_out_cudnn_attention


@pytest.fixture(autouse=True)
def _cudnn_attention_restored():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_cudnn_attention_is_left_out():
    torch.backends.cuda.enable_cudnn_sdp(True)
    leave_out_cudnn_attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_low_logits_over_sixty_four_tokens_have_a_finite_gradient():
    torch.backends.cuda.enable_cudnn_sdp(True)
    device = choose_device("cuda")
    torch.manual_seed(0)
    attention = SelfAttention(128, 2).to(device)
    with torch.no_grad():
        # One channel of each head makes every logit about -120, below the logarithm of float32's range.
        q, k, _ = attention.qkv.bias.view(3, 2, 64).unbind(0)
        q[:, 0], k[:, 0] = 1.0, -120 * 8.0
    x = torch.randn(4, 64, 128, device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        attention(x).square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())
