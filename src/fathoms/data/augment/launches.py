"""Launch the Triton kernels: crop and resize, a layer of operations, the last pass.

Small arrays travel in one transfer. Each image has an operation code that its programs branch on, so images with
different operations need not be gathered, and the host's work does not grow with the number of operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from jaxtyping import Float, Float32, Int32, UInt8
from torch import Tensor

from fathoms.data.augment import layer_kernels as codes
from fathoms.data.augment.erase_and_mix import Finish
from fathoms.data.augment.layer_kernels import layer_kernel, table_kernel
from fathoms.data.augment.per_image import PLANE, POINTWISE, matrices
from fathoms.data.augment.pixel_kernels import (
    FIELDS,
    REACH,
    blur_kernel,
    columns_kernel,
    copy_kernel,
    finish_kernel,
    rows_kernel,
)
from fathoms.data.augment.policies import Layer
from fathoms.data.counter_rng import sample_keys, to_device
from fathoms.data.images.pixels import PixelLayout
from fathoms.errors import BackendError
from fathoms.ops.dispatch import launch, launch_options, why_not_triton
from fathoms.registry import check_name

# Rows and columns of the result per program, at most.
_ROWS, _COLUMNS, _WARPS = 16, 64, 4
_VALUES = np.arange(256, dtype=np.uint8)


def resize_boxes(
    pixels: Int32[Tensor, " n"], layout: PixelLayout, size: int
) -> UInt8[Tensor, "B 3 size size"]:
    """`fathoms.data.images.pixels.resize_boxes` in two launches, or in one if every box has the wanted size already."""
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


IMAGE_TABLES = ("auto_contrast", "contrast", "equalize")

CODES: dict[str, int] = {
    **dict.fromkeys(POINTWISE, codes.GIVEN.value),
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
    """The images that get a table, those whose table is given first."""
    given: UInt8[np.ndarray, "g 256"]
    matrix: Float32[np.ndarray, "m 6"]
    blurred: Int32[np.ndarray, " b"]
    boxes: Float32[np.ndarray, "b k"]


def kernel_arguments(layer: Layer, height: int, width: int) -> KernelArguments:
    """Convert a layer to kernel arguments."""
    for kind in layer.rows:
        check_name(kind, CODES, "operation", "apply_layer")
    pointwise, tabled, moved, blurred = (
        {kind: rows for kind, rows in layer.rows.items() if kind in kinds}
        for kinds in (POINTWISE, IMAGE_TABLES, PLANE, ("gaussian_blur",))
    )
    code, slot = np.zeros((2, len(layer.argument)), np.int32)
    for kind, rows in layer.rows.items():
        code[rows] = CODES[kind]
    tables, mapped, blurs = (_joined(group) for group in (pointwise | tabled, moved, blurred))
    code[mapped] += layer.cubic[mapped]
    slot[tables] = np.arange(len(tables))
    slot[mapped] = np.arange(len(mapped))
    given = [
        np.broadcast_to(POINTWISE[kind](_VALUES, layer.argument[rows, None]), (len(rows), 256))
        for kind, rows in pointwise.items()
    ]
    maps = [matrices(kind, layer.argument[rows], height, width) for kind, rows in moved.items()]
    factor = layer.argument.astype(np.float32)
    return KernelArguments(
        code,
        slot,
        factor,
        tables,
        np.concatenate([np.empty((0, 256), np.uint8), *given]),
        np.concatenate([np.empty((0, 6)), *maps]).astype(np.float32),
        blurs,
        blur_boxes(factor[blurs]),
    )


def blur_boxes(factor: Float32[np.ndarray, " b"]) -> Float32[np.ndarray, "b k"]:
    """Weights of the box that, applied three times, blurs with standard deviation `factor`, at most 2.5.

    A box of fractional radius r has 1 / (2r + 1) inside, and its two ends share the rest.
    """
    variance = (factor / 3 * factor).astype(np.float64)
    whole = np.floor((np.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    radius, whole = (whole + part).astype(np.float32)[:, None], whole.astype(np.float32)[:, None]
    weight = 1 / (2 * radius + 1)
    place = np.abs(np.arange(-REACH.value, REACH.value + 1))
    kernel = np.where(place <= whole, weight, np.float32(0))
    return np.where(place == whole + 1, (1 - (2 * whole + 1) * weight) / 2, kernel).astype(np.float32)


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
    code, slot, factor, tabled, given, matrix, blurred, boxes = to_device(arguments, images.device)
    tables = torch.empty(len(tabled), 3, 256, dtype=torch.uint8, device=images.device)
    tiles = triton.cdiv(pixels, TILE)
    # Triton launches on the current device, which in a new thread is the first one.
    with torch.cuda.device_of(images):
        if len(tabled):
            launch(
                table_kernel, (3 * len(tabled),), images, tables, tabled, code, factor, given, pixels,
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


# Pixels of one program, at most.
_PIXELS = 1024


def finish(
    images: UInt8[Tensor, "B 3 H W"],
    scale: Float[Tensor, "3 1 1"],
    shift: Float[Tensor, "3 1 1"],
    dtype: torch.dtype,
    drawn: Finish,
) -> Float[Tensor, "B 3 H W"]:
    """`erase_and_mix.finish` in one launch; mixed values are rounded to `dtype` once, at the end."""
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
