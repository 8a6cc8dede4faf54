"""Softmax attention through torch's fused kernels, except one whose gradient is wrong at some sizes."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fathoms.ops.dispatch import constant_to_compiler


def attend(
    q: Float[Tensor, "B H Q K"], k: Float[Tensor, "B H N K"], v: Float[Tensor, "B H N K"]
) -> Float[Tensor, "B H Q K"]:
    """softmax(q kᵀ / sqrt K) v.

    cuDNN's kernel, torch's first choice on an H100 or H200, makes NaN gradients of finite numbers where the
    number of keys is a multiple of 64 and a row's logits are low (pytorch issue 196678; a ViT on 8x8 patches
    meets it). There, and only there, it is left out.
    """
    if q.is_cuda and k.shape[-2] % 64 == 0:
        with sdpa_kernel(_sound_backends()):
            return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


# A constant to torch.compile, which cannot read the switches itself.
@constant_to_compiler
def _sound_backends() -> list[SDPBackend]:
    """The other backends, without those that are switched off."""
    switches = torch.backends.cuda
    others = {
        SDPBackend.FLASH_ATTENTION: switches.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: switches.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: switches.math_sdp_enabled(),
    }
    return [kernel for kernel, on in others.items() if on]


def leave_out_cudnn_attention() -> ExitStack:
    """Switch that backend off for the whole process, for models that call torch's attention themselves.

    Nothing narrower reaches them: their forward and backward passes run far from where they are built. As a context
    it switches the backend back on at its end, if it was on before.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    restore = ExitStack()
    restore.callback(torch.backends.cuda.enable_cudnn_sdp, before)
    return restore
