"""Rotation, shear and translation as one affine map of a batch, with Pillow's sampling rules.

Pillow takes the colour at the mapped pixel centre, repeats the edge for the neighbours it needs,
and fills where the centre itself falls outside. Its bicubic weights have a = -1. torch's
grid_sample has other bicubic weights and no such fill, so the taps are gathered here.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from fathoms.data.augment.lookup_tables import cut
from fathoms.data.crop.pixel_buffer import add_weighted, as_words, word_planes

PLANE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


def matrices(kind: str, factor: Float[np.ndarray, " B"], height: int, width: int) -> Float[np.ndarray, "B 6"]:
    """Matrix (a, b, c, d, e, f) of each sample: the colour of (x, y) is found at (ax + by + c, dx + ey + f).

    Zero is the left or upper edge. `factor` is an angle in degrees, counter-clockwise about the middle, the
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


def tap_weights(d: Float[Tensor, "*shape"], taps: int) -> list[Float[Tensor, "*shape"]]:
    """Weights of the two (linear) or four (cubic) neighbours of a point that lies `d` past a pixel centre."""
    if taps == 2:
        return [1 - d, d]
    return [d * (-1 + d * (2 - d)), 1 + d * d * (d - 2), d * (1 + d * (1 - d)), d * d * (d - 1)]


def _add_taps(
    out: Float[Tensor, "3 B H W"],
    words: Int32[Tensor, " n"],
    first: Int32[Tensor, "B 1 1"],
    corner: Int32[Tensor, "2 B H W"],
    past: Float[Tensor, "2 B H W"],
    taps: int,
) -> None:
    """Add to `out` the neighbours of points that lie `past` a pixel `corner`; images begin at `first`."""
    height, width = out.shape[2:]
    across, along = torch.stack(tap_weights(past, taps)).unbind(1)
    tap = torch.arange(1 - taps // 2, 1 + taps // 2, device=out.device, dtype=torch.int32)
    near_x, near_y = (corner + tap.view(-1, 1, 1, 1, 1)).unbind(1)
    columns, rows = near_x.clamp_(0, width - 1) + first, near_y.clamp_(0, height - 1) * width
    for row, row_weight in zip(rows, along, strict=True):
        place, weight = row + columns, row_weight * across
        fetched = words.index_select(0, place.flatten()).view(place.shape)
        for value, share in zip(fetched, weight, strict=True):
            add_weighted(out, word_planes(value), share)


def affine(
    images: UInt8[Tensor, "B 3 H W"], matrix: Float[Tensor, "B 6"], cubic: int, fill: UInt8[Tensor, "3"]
) -> UInt8[Tensor, "B 3 H W"]:
    """Map every image by its own matrix: the first `cubic` with the bicubic filter, the others bilinear."""
    count, _, height, width = images.shape
    words, device = as_words(images.permute(0, 2, 3, 1)).flatten(), images.device
    right = torch.arange(width, device=device) + 0.5
    down = torch.arange(height, device=device)[:, None] + 0.5
    # Both coordinates at once: the first dimension is x, y.
    along_x, along_y, shift = matrix.view(-1, 2, 3, 1, 1).transpose(0, 1).unbind(2)
    point = along_x * right + along_y * down + shift
    x, y = point
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    point = point - 0.5
    corner = point.floor()
    past, corner = point - corner, corner.to(torch.int32)
    first = torch.arange(count, device=device, dtype=torch.int32)[:, None, None] * (height * width)
    out = torch.zeros(3, count, height, width, device=device)
    for own, taps in ((slice(0, cubic), 4), (slice(cubic, count), 2)):
        if own.start < own.stop:
            _add_taps(out[:, own], words, first[own], corner[:, own], past[:, own], taps)
    return torch.where(inside, cut(out), fill.view(3, 1, 1, 1)).transpose(0, 1)
