"""Rotation, shear and translation as one affine map of a batch, with Pillow's sampling rules.

Pillow takes the colour at the mapped pixel centre, repeats the edge for the neighbours it needs,
and fills where the centre itself falls outside. Its bicubic weights have a = -1. torch's
grid_sample has other bicubic weights and no such fill, so the taps are gathered here.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fathoms.data.augment.tables import cut
from fathoms.data.words import as_planes, as_words, join_bytes, word_bytes

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


def tap_weights(d: Float[Tensor, "*shape"], cubic: Float[Tensor, "*ones"]) -> Float[Tensor, "4 *shape"]:
    """Weights of the four neighbours of a point that lies `d` past the second; linear ones use two.

    `cubic` is 1 or 0: a product with it costs less than a choice between two.
    """
    rest, square = 1 - d, d * d
    outer = d * (-1 + d * (2 - d)), square * (d - 1)
    inner = 1 + square * (d - 2), d * (1 + d * rest)
    chosen = cubic > 0
    return torch.stack(
        [
            outer[0] * cubic,
            torch.where(chosen, inner[0], rest),
            torch.where(chosen, inner[1], d),
            outer[1] * cubic,
        ]
    )


def affine(
    images: UInt8[Tensor, "B 3 H W"],
    matrix: Float[Tensor, "B 6"],
    cubic: Float[Tensor, " B"],
    fill: UInt8[Tensor, "3"],
) -> UInt8[Tensor, "B 3 H W"]:
    """Every picture through its own map and filter (`cubic` is 1 or 0): four fetches of four neighbours."""
    count, _, height, width = images.shape
    words, device = as_words(images.permute(0, 2, 3, 1)).flatten(), images.device
    right = torch.arange(width, device=device) + 0.5
    down = torch.arange(height, device=device)[:, None] + 0.5
    # Both coordinates at once: the first dimension is x, y.
    along_x, along_y, shift = matrix.view(-1, 2, 3, 1, 1).transpose(0, 1).unbind(2)
    point = along_x * right + along_y * down + shift
    x, y = point
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    past = point - 0.5
    corner = past.floor()
    across, along = tap_weights(past - corner, cubic[:, None, None]).unbind(1)
    tap = torch.arange(-1, 3, device=device, dtype=torch.int32)[:, None, None, None, None]
    near_x, near_y = (corner.to(torch.int32) + tap).unbind(1)
    first = torch.arange(count, device=device, dtype=torch.int32)[:, None, None] * (height * width)
    columns, rows = near_x.clamp(0, width - 1) + first, near_y.clamp(0, height - 1) * width
    out = torch.zeros(count, height, width, 4, device=device)
    for row, row_weight in zip(rows, along, strict=True):
        place, weight = row + columns, row_weight * across
        fetched = word_bytes(words.index_select(0, place.flatten()).view(place.shape))
        for value, share in zip(fetched, weight[..., None], strict=True):
            out.addcmul_(value, share)
    return as_planes(torch.where(inside, join_bytes(cut(out)), as_words(fill)))
