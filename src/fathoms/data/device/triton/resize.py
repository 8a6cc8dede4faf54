"""Launch the kernels that crop, resize and flip a batch of images on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from jaxtyping import Int32, UInt8
from torch import Tensor

from fathoms.data.crop.pixel_buffer import PixelLayout
from fathoms.data.device.triton.resize_kernels import FIELDS, columns_kernel, copy_kernel, rows_kernel
from fathoms.data.to_device import to_device
from fathoms.ops.triton.launch import launch, launch_options

# Rows and columns of the result per program, at most.
_ROWS, _COLUMNS, _WARPS = 16, 64, 4


def resize_boxes(
    pixels: Int32[Tensor, " n"], layout: PixelLayout, size: int
) -> UInt8[Tensor, "B 3 size size"]:
    """`fathoms.data.device.resize.resize_boxes` in two launches, or in one if every box has the wanted size already."""
    count, (top, left, box_h, box_w), (height, width) = len(layout.box), layout.box.T, layout.size.T
    low, high = np.clip(top, 0, height - 1), np.clip(top + box_h, 1, height)
    rows = high - low
    start = np.cumsum(rows) - rows
    fields = {
        "offset": layout.offset, "pitch": layout.pitch, "top": top, "left": left, "box_h": box_h, "box_w": box_w,
        "width": width, "rows": rows, "low": low, "start": start, "high": high,
        "cubic": layout.cubic, "flip": layout.flip,
    }  # fmt: skip
    (table,) = to_device([np.stack([fields[name] for name in FIELDS]).astype(np.int64)], pixels.device)
    images = torch.empty(count, 3, size, size, dtype=torch.uint8, device=pixels.device)
    tile = min(_COLUMNS, triton.next_power_of_2(size))
    options: dict[str, Any] = {"SIZE": size, "R": _ROWS, "C": tile, **launch_options(_WARPS, 2)}
    across = triton.cdiv(size, tile)
    whole = (count, triton.cdiv(size, _ROWS), across)
    if (layout.box[:, 2:] == size).all():
        launch(copy_kernel, whole, pixels, table, images, count, **options)
        return images
    columns = torch.empty(int(rows.sum()), size, dtype=torch.int32, device=pixels.device)
    touched = (count, triton.cdiv(int(rows.max()), _ROWS), across)
    launch(columns_kernel, touched, pixels, table, columns, count, **options)
    launch(rows_kernel, whole, columns, table, images, count, **options)
    return images
