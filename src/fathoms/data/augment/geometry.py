"""Rotation, shear and translation as one affine map of a batch, with Pillow's sampling rules.

Pillow takes the colour at the mapped pixel centre, repeats the edge for the neighbours it needs,
and fills where the centre itself falls outside. Its bicubic weights have a = -1. torch's
grid_sample has other bicubic weights and no such fill, so the taps are gathered here.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from fathoms.data.augment.tables import cut

PLANE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


def matrices(kind: str, factor: Float[np.ndarray, " B"], height: int, width: int) -> Float[np.ndarray, "B 6"]:
    """(a, b, c, d, e, f) of each sample: the colour of (x, y) is found at (ax + by + c, dx + ey + f).

    Zero is the left or upper edge. `factor` is an angle in degrees against the clock about the middle, the
    tangent of a shear from the top or left, or the share of the width or height to move left or up.
    """
    if kind == "rotate":
        angle = -np.deg2rad(factor)
        cos, sin, x, y = np.cos(angle), np.sin(angle), width / 2, height / 2
        return np.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], 1)
    out = np.tile(np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]), (len(factor), 1))
    column, scale = {
        "shear_x": (1, 1),
        "shear_y": (3, 1),
        "translate_x": (2, width),
        "translate_y": (5, height),
    }[kind]
    out[:, column] = factor * scale
    return out


def cubic_weights(d: Tensor) -> list[Tensor]:
    """Weights of the four neighbours of a point that lies `d` past the second."""
    return [d * (-1 + d * (2 - d)), 1 + d * d * (d - 2), d * (1 + d * (1 - d)), d * d * (d - 1)]


def tap_weights(d: Tensor, cubic: Bool[Tensor, "B 1 1"]) -> list[Tensor]:
    """The same for each picture's own filter; linear ones use the two in the middle."""
    linear = (0.0, 1 - d, d, 0.0)
    return [torch.where(cubic, four, two) for four, two in zip(cubic_weights(d), linear, strict=True)]


def affine(
    images: UInt8[Tensor, "B 3 H W"],
    matrix: Float[Tensor, "B 6"],
    cubic: Bool[Tensor, " B"],
    fill: UInt8[Tensor, "3"],
) -> UInt8[Tensor, "B 3 H W"]:
    """Every picture through its own map and filter: sixteen gathers, or one kernel when compiled."""
    height, width = images.shape[2:]
    a, b, c, d, e, f = (matrix[:, i, None, None] for i in range(6))
    right = torch.arange(width, device=images.device) + 0.5
    down = torch.arange(height, device=images.device)[:, None] + 0.5
    x, y = a * right + b * down + c, d * right + e * down + f
    inside = ((x >= 0) & (x < width) & (y >= 0) & (y < height))[:, None]
    left, top = (x - 0.5).floor(), (y - 0.5).floor()
    chosen = cubic[:, None, None]
    across, along = tap_weights(x - 0.5 - left, chosen), tap_weights(y - 0.5 - top, chosen)
    columns = [(left.long() + tap).clamp_(0, width - 1) for tap in range(-1, 3)]
    rows = [(top.long() + tap).clamp_(0, height - 1) * width for tap in range(-1, 3)]
    flat = images.flatten(2)
    out = torch.zeros(images.shape, device=images.device)
    for row, row_weight in zip(rows, along, strict=True):
        for column, weight in zip(columns, across, strict=True):
            place = (row + column).flatten(1)[:, None].expand(-1, 3, -1)
            fetched = flat.gather(2, place).view(images.shape)
            out = torch.addcmul(out, fetched.float(), (row_weight * weight)[:, None])
    return torch.where(inside, cut(out), fill[:, None, None])
