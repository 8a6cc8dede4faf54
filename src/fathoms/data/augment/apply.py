"""Apply drawn operations to a batch: samples with the same operation go through it together.

The choices are made on the host, so groups have sizes known there and the device never has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from fathoms.data.augment import enhance, geometry
from fathoms.data.augment.policy import Layer
from fathoms.data.augment.tables import TABLES, look_up

PLANE: dict[str, Callable[..., Tensor]] = {
    "rotate": geometry.rotate,
    "shear_x": geometry.shear_x,
    "shear_y": geometry.shear_y,
    "translate_x": geometry.translate_x,
    "translate_y": geometry.translate_y,
}
COLOUR: dict[str, Callable[..., Tensor]] = {
    "colour": enhance.colour,
    "sharpness": enhance.sharpness,
    "gaussian_blur": enhance.gaussian_blur,
    "hue": enhance.hue,
}


@dataclass(frozen=True)
class Kernels:
    """The functions behind the operations: as written, or compiled."""

    plane: Mapping[str, Callable[..., Tensor]]
    colour: Mapping[str, Callable[..., Tensor]]


def rotate_with_pillow(
    images: UInt8[Tensor, "B 3 H W"], factor: Tensor, cubic: bool, fill: UInt8[Tensor, "3"]
) -> UInt8[Tensor, "B 3 H W"]:
    """What `geometry.rotate` does, by Pillow's own loop, which on a CPU beats sixteen gathers."""
    from PIL import Image

    resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    out, colour = torch.empty_like(images), tuple(fill.tolist())
    for row, degrees in enumerate(factor.tolist()):
        picture = Image.fromarray(images[row].permute(1, 2, 0).contiguous().numpy())
        turned = np.array(picture.rotate(degrees, resample, fillcolor=colour))
        out[row].copy_(torch.from_numpy(turned).permute(2, 0, 1))
    return out


EAGER = Kernels(PLANE, COLOUR)
CPU = Kernels({**PLANE, "rotate": rotate_with_pillow}, COLOUR)


def compiled_kernels() -> Kernels:
    """Every operation through torch.compile, once for all group sizes.

    Worth it on a GPU, where an operation is tens of launches as written and one or two compiled.
    """

    def compiled(functions: dict[str, Callable[..., Tensor]]) -> dict[str, Callable[..., Tensor]]:
        return {name: torch.compile(function, dynamic=True) for name, function in functions.items()}

    return Kernels(compiled(PLANE), compiled(COLOUR))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a small host array to the device without making the host wait."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def put_rows(images: Tensor, rows: np.ndarray, where: Tensor, parts: list[Tensor]) -> Tensor:
    """Set images[rows] to the pictures of all `parts`; `where` is `rows` on the device."""
    if images.device.type != "cpu":
        return images.index_copy_(0, where, torch.cat(parts))
    # On a CPU every indexed store goes element by element; a copy per picture is ten times as fast.
    pictures = (picture for part in parts for picture in part)
    for row, picture in zip(rows.tolist(), pictures, strict=True):
        images[row].copy_(picture)
    return images


def apply_layer(
    images: UInt8[Tensor, "B 3 H W"], layer: Layer, fill: UInt8[Tensor, "3"], kernels: Kernels = EAGER
) -> UInt8[Tensor, "B 3 H W"]:
    """The batch with each sample's operation applied; `images` itself is changed and returned."""
    groups: list[tuple[str, bool, np.ndarray]] = []
    for kind in sorted(set(layer.kind) - {""}):
        rows = np.flatnonzero(layer.kind == kind)
        if kind in PLANE:
            groups += [(kind, True, rows[layer.cubic[rows]]), (kind, False, rows[~layer.cubic[rows]])]
        else:
            groups.append((kind, False, rows))
    # Operations that are tables come first, so that one look-up at the end serves all of them.
    groups = sorted((g for g in groups if len(g[2])), key=lambda group: group[0] not in TABLES)
    if not groups:
        return images
    order = np.concatenate([rows for _, _, rows in groups])
    where = to_device(order, images.device)
    factors = to_device(layer.argument[order].astype(np.float32), images.device)
    picked = images.index_select(0, where)
    results, tables, start = [], [], 0
    for kind, cubic, rows in groups:
        stop = start + len(rows)
        part, factor = picked[start:stop], factors[start:stop]
        if kind in TABLES:
            tables.append(TABLES[kind](part, factor).expand(-1, 3, -1))
        elif kind in PLANE:
            results.append(kernels.plane[kind](part, factor, cubic, fill))
        else:
            results.append(kernels.colour[kind](part, factor))
        start = stop
    if tables:
        table = torch.cat(tables)
        results.insert(0, look_up(picked[: len(table)], table))
    return put_rows(images, order, where, results)
