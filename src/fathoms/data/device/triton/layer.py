"""Apply drawn operations to a batch with Triton kernels: one transfer and at most three launches.

Each image has an operation code that its programs branch on, so images with different operations need not be
gathered, and the host's work does not grow with the number of operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from jaxtyping import Float32, Float64, Int32, UInt8
from torch import Tensor

from fathoms.data.augment.filters import blur_boxes
from fathoms.data.augment.geometry import PLANE, matrices
from fathoms.data.augment.lookup_tables import FACTOR_LINES, IMAGE_TABLES
from fathoms.data.augment.policy import Layer
from fathoms.data.device.triton import table_kernels as codes
from fathoms.data.device.triton.blur_kernels import blur_kernel
from fathoms.data.device.triton.layer_kernels import layer_kernel
from fathoms.data.device.triton.table_kernels import table_kernel
from fathoms.data.to_device import to_device
from fathoms.errors import BackendError
from fathoms.names.registry import check_name
from fathoms.ops.dispatch import why_not_triton
from fathoms.ops.triton.launch import launch, launch_options

CODES: dict[str, int] = {
    **dict.fromkeys(FACTOR_LINES, codes.LINES.value),
    **dict.fromkeys(PLANE, codes.LINEAR.value),
    "auto_contrast": codes.AUTO_CONTRAST.value,
    "contrast": codes.CONTRAST.value,
    "equalize": codes.EQUALIZE.value,
    "colour": codes.COLOUR.value,
    "sharpness": codes.SHARPNESS.value,
    "hue": codes.HUE.value,
    "gaussian_blur": codes.BLUR.value,
}

# An image of 32 x 32 is one tile, processed in parts where the whole tile would need too many registers. For larger
# images one program computes the statistics in larger blocks with more warps, and so for blurs.
TILE, PART, STEP = 1024, 256, 4096


def _options(warps: int) -> dict[str, Any]:
    # Fused multiply-adds would round differently from the torch reference.
    return {**launch_options(warps, 1), "enable_fp_fusion": False}


class KernelArguments(NamedTuple):
    """The kernels' arguments as host arrays: per image, per table, per matrix and per blurred image."""

    code: Int32[np.ndarray, " B"]
    slot: Int32[np.ndarray, " B"]
    """Index of the image's table or matrix."""
    factor: Float32[np.ndarray, " B"]
    tabled: Int32[np.ndarray, " t"]
    """The images that get a table, those with lines first."""
    lines: Float64[np.ndarray, "l 6"]
    matrix: Float32[np.ndarray, "m 6"]
    blurred: Int32[np.ndarray, " b"]
    boxes: Float32[np.ndarray, "b k"]


def kernel_arguments(layer: Layer, height: int, width: int) -> KernelArguments:
    """Convert a layer to kernel arguments."""
    for kind in layer.rows:
        check_name(kind, CODES, "operation", "apply_layer")
    lined, tabled, moved, blurred = (
        {kind: rows for kind, rows in layer.rows.items() if kind in kinds}
        for kinds in (FACTOR_LINES, IMAGE_TABLES, PLANE, ("gaussian_blur",))
    )
    code, slot = np.zeros((2, len(layer.argument)), np.int32)
    for kind, rows in layer.rows.items():
        code[rows] = CODES[kind]
    tables, mapped, blurs = (_joined(group) for group in (lined | tabled, moved, blurred))
    code[mapped] += layer.cubic[mapped]
    slot[tables] = np.arange(len(tables))
    slot[mapped] = np.arange(len(mapped))
    lines = [FACTOR_LINES[kind](layer.argument[rows]) for kind, rows in lined.items()]
    maps = [matrices(kind, layer.argument[rows], height, width) for kind, rows in moved.items()]
    factor = layer.argument.astype(np.float32)
    boxes = np.empty((0, 0), np.float32)
    if len(blurs):
        boxes = blur_boxes(torch.from_numpy(factor[blurs])).numpy()
    return KernelArguments(
        code,
        slot,
        factor,
        tables,
        np.concatenate([np.empty((6, 0)), *lines], 1).T,
        np.concatenate([np.empty((0, 6)), *maps]).astype(np.float32),
        blurs,
        boxes,
    )


def _joined(groups: dict[str, np.ndarray]) -> Int32[np.ndarray, " n"]:
    return np.concatenate([np.empty(0, np.int32), *groups.values()]).astype(np.int32)


def apply_layer(
    images: UInt8[Tensor, "B 3 H W"], layer: Layer, fill: UInt8[Tensor, "3"]
) -> UInt8[Tensor, "B 3 H W"]:
    """Apply each sample's operation to a new tensor; returns `images` itself if there is none."""
    if reason := why_not_triton(images):
        raise BackendError(f"apply_layer: the Triton kernels cannot run: {reason}; use the torch backend")
    count, _, height, width = images.shape
    pixels = height * width
    if not layer.rows or not images.numel():
        return images
    arguments = kernel_arguments(layer, height, width)
    images, out = images.contiguous(), torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    code, slot, factor, tabled, lines, matrix, blurred, boxes = to_device(arguments, images.device)
    tables = torch.empty(len(tabled), 3, 256, dtype=torch.uint8, device=images.device)
    tiles = triton.cdiv(pixels, TILE)
    # Triton launches on the current device, which in a new thread is the first one.
    with torch.cuda.device_of(images):
        if len(tabled):
            launch(
                table_kernel, (3 * len(tabled),), images, tables, tabled, code, factor, lines, pixels,
                BLOCK=TILE if pixels <= TILE else STEP, **_options(4 if pixels <= TILE else 8),
            )  # fmt: skip
        launch(
            layer_kernel, (count * tiles,), images, out, code, slot, factor, matrix, tables, fill, height, width,
            BLOCK=TILE, PART=PART, **_options(4),
        )  # fmt: skip
        if len(blurred):
            _blur(images, out, blurred, boxes)
    return out


def _blur(images: Tensor, out: Tensor, rows: Tensor, boxes: Tensor) -> None:
    """Set out[rows] to images[rows] blurred."""
    height, width = images.shape[2:]
    scratch = torch.empty(len(rows), 3, height, width, dtype=torch.uint8, device=images.device)
    # Words of four pixels, if rows are whole words and the images start at one.
    word = 1 if width % 4 or images.storage_offset() % 4 else 4
    planes = [images, out, scratch] if word == 1 else [t.view(torch.int32) for t in (images, out, scratch)]
    units = height * width // word
    block, warps = (256, 4) if units <= 256 else (2048, 16)
    launch(
        blur_kernel, (3 * len(rows),), *planes, rows, boxes, height, width,
        WORD=word, BLOCK=block, **_options(warps),
    )  # fmt: skip
