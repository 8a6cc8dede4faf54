"""Apply drawn operations to a batch: samples with the same operation go through it together.

The choices are made on the host, so group sizes are known there and no host-device sync is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from fathoms.data.augment import filters
from fathoms.data.augment.geometry import PLANE, affine, matrices
from fathoms.data.augment.lookup_tables import (
    FACTOR_LINES,
    IMAGE_TABLES,
    image_table,
    line_tables,
    look_up,
)
from fathoms.data.augment.policy import Layer
from fathoms.data.to_device import to_device

COLOUR: dict[str, Callable[..., Tensor]] = {
    "colour": filters.colour,
    "sharpness": filters.sharpness,
    "gaussian_blur": filters.gaussian_blur,
    "hue": filters.hue,
}


_NONE = np.empty(0, np.int64)


def put_rows(images: Tensor, rows: np.ndarray, where: Tensor, part: Tensor) -> Tensor:
    """Set images[rows] to `part`; `where` is `rows` on the device."""
    if images.device.type != "cpu":
        return images.index_copy_(0, where, part)
    # On a CPU an indexed store copies element by element; a copy per image is ten times as fast.
    for row, image in zip(rows.tolist(), part, strict=True):
        images[row].copy_(image)
    return images


def apply_layer(
    images: UInt8[Tensor, "B 3 H W"], layer: Layer, fill: UInt8[Tensor, "3"]
) -> UInt8[Tensor, "B 3 H W"]:
    """Apply each sample's operation, in place; returns `images`."""
    groups = [
        {kind: rows for kind, rows in layer.rows.items() if kind in kinds}
        for kinds in (FACTOR_LINES, IMAGE_TABLES, PLANE, COLOUR)
    ]
    if not any(groups):
        return images
    lined, tabled, moved, other = groups
    lines = [FACTOR_LINES[kind](layer.argument[rows]) for kind, rows in lined.items()]
    maps = [matrices(kind, layer.argument[rows], *images.shape[2:]) for kind, rows in moved.items()]
    mapped = np.concatenate([_NONE, *moved.values()])
    # Images with the bicubic filter first, as `affine` takes them.
    by_filter = np.argsort(~layer.cubic[mapped], kind="stable")
    ordered = (*lined.values(), *tabled.values(), mapped[by_filter], *other.values())
    order = np.concatenate(ordered)
    where, factor, line, matrix = to_device(
        [
            order,
            layer.argument[order].astype(np.float32),
            np.concatenate([np.empty((6, 0)), *lines], 1),
            np.concatenate([np.empty((0, 6)), *maps])[by_filter].astype(np.float32),
        ],
        images.device,
    )
    picked = images.index_select(0, where)
    start, results = line.shape[1], []
    tables = [line_tables(line)] if lined else []
    for kind, rows in tabled.items():
        stop = start + len(rows)
        tables.append(image_table(kind, picked[start:stop], factor[start:stop]))
        start = stop
    if tables:
        results.append(look_up(picked[:start], torch.cat([table.expand(-1, 3, -1) for table in tables])))
    if moved:
        stop = start + len(matrix)
        cubic = int(layer.cubic[mapped].sum())
        results.append(affine(picked[start:stop], matrix, cubic, fill))
        start = stop
    for kind, rows in other.items():
        stop = start + len(rows)
        results.append(COLOUR[kind](picked[start:stop], factor[start:stop]))
        start = stop
    return put_rows(images, order, where, torch.cat(results))
