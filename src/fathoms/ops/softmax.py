"""Plain attention through torch's fused kernels, but for one whose gradient is wrong at some sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SOUND = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(
    q: Float[Tensor, "B H Q K"], k: Float[Tensor, "B H N K"], v: Float[Tensor, "B H N K"]
) -> Float[Tensor, "B H Q K"]:
    """softmax(q kᵀ / sqrt K) v.

    cuDNN's kernel, torch's first choice on an H100 or H200, makes NaN gradients of finite numbers where the
    number of keys is a multiple of 64 and a row's logits are low (pytorch issue 196678; a ViT on 8x8 patches
    meets it). There, and only there, it is left out.
    """
    if q.is_cuda and k.shape[-2] % 64 == 0:
        with sdpa_kernel(SOUND):
            return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


def leave_out_cudnn_attention() -> None:
    """Keep the whole process off that kernel: for models whose attention is not ours to choose."""
    torch.backends.cuda.enable_cudnn_sdp(False)
