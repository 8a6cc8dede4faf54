"""Launch the kernel that normalises, erases and mixes."""

from __future__ import annotations

import numpy as np
import torch
import triton
from jaxtyping import Float, UInt8
from torch import Tensor

from fathoms.data.augment.finish import Finish
from fathoms.data.counter_rng import sample_keys
from fathoms.data.device.triton.finish_kernels import finish_kernel
from fathoms.data.to_device import to_device
from fathoms.ops.triton.launch import launch, launch_options

# Pixels of one program, at most.
_PIXELS, _WARPS = 1024, 4


def finish(
    images: UInt8[Tensor, "B 3 H W"],
    scale: Float[Tensor, "3 1 1"],
    shift: Float[Tensor, "3 1 1"],
    dtype: torch.dtype,
    drawn: Finish,
) -> Float[Tensor, "B 3 H W"]:
    """`fathoms.data.augment.finish.finish` in one launch; mixed values are rounded to `dtype` once, at the end."""
    images = images.contiguous()
    count, _, height, width = images.shape
    none, numbers = np.empty(0, np.int32), np.empty(0, np.int64)
    edges, keys, mode, rectangles = none, numbers, "const", 0
    if drawn.erasing is not None:
        top, left, tall, wide = np.moveaxis(drawn.erasing.rectangles, -1, 0)
        edges = np.stack([top, top + tall, left, left + wide], -1).astype(np.int32)
        keys = sample_keys(0, 0, "noise", drawn.erasing.keys.view(np.int64)).view(np.int64)
        mode, rectangles = drawn.erasing.mode, edges.shape[1]
    shares, partners, boxes = np.empty(0, np.float32), none, none
    if drawn.mixture is not None:
        shares = np.where(drawn.mixture.cut, -1, drawn.mixture.share).astype(np.float32)
        partners, boxes = drawn.mixture.partner.astype(np.int32), drawn.mixture.box.astype(np.int32)
    there = to_device([edges, keys, shares, partners, boxes], images.device)
    out = torch.empty(images.shape, dtype=dtype, device=images.device)
    block = min(_PIXELS, triton.next_power_of_2(height * width))
    launch(
        finish_kernel, (count, triton.cdiv(height * width, block)), images,
        torch.cat([scale.flatten(), shift.flatten()]), *there, out,
        HEIGHT=height, WIDTH=width, COUNT=rectangles, MODE=mode, MIXED=drawn.mixture is not None, P=block,
        **launch_options(_WARPS, 1),
    )  # fmt: skip
    return out
