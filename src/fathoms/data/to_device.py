"""Copy small host arrays to a device, all in one transfer.

Below the rooms of `data/`: augmentation and the device kernels both send what was drawn on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Views of another type must start at a multiple of its size; sixteen bytes also keep loads aligned.
_ALIGNMENT = 16


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy small host arrays to the device in one transfer, without making the host wait.

    A transfer costs the host the same for a byte as for a megabyte, so all travel in one buffer and come
    out as views of it.
    """
    sizes = [array.nbytes for array in arrays]
    starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for array, start, size in zip(arrays, starts[:-1], sizes, strict=True):
        host[start : start + size].view(array.dtype).reshape(array.shape)[...] = array
    there = buffer.to(device, non_blocking=True)
    return [
        there[start : start + size].view(_torch_type(array.dtype)).view(array.shape)
        for array, start, size in zip(arrays, starts[:-1], sizes, strict=True)
    ]


def _torch_type(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
