"""Rotation, shear and translation of a batch, with Pillow's sampling rules.

Pillow takes the colour at the mapped pixel centre, repeats the edge for the neighbours it needs,
and fills where the centre itself falls outside. Its bicubic weights have a = -1. torch's
grid_sample has other bicubic weights and no such fill, so the taps are gathered here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from fathoms.data.augment.tables import cut

Images = UInt8[Tensor, "B 3 H W"]
Factor = Float[Tensor, " B"]
Fill = UInt8[Tensor, "3"]


def _weights(d: Float[Tensor, "..."], cubic: bool, dim: int) -> Float[Tensor, "..."]:
    """Weights of the neighbours of a point that lies `d` past a pixel centre, in a new dimension."""
    if not cubic:
        return torch.stack([1 - d, d], dim)
    return torch.stack(
        [d * (-1 + d * (2 - d)), 1 + d * d * (d - 2), d * (1 + d * (1 - d)), d * d * (d - 1)], dim
    )


def _filled(out: Tensor, inside: Bool[Tensor, "B 1 H W"], fill: Fill) -> Images:
    """Bytes of `out` inside, the fill outside; arithmetic, as torch.where is ten times slower on a CPU."""
    kept = inside.to(torch.uint8)
    return cut(out) * kept + fill[:, None, None] * (1 - kept)


def _first(cubic: bool) -> int:
    return -1 if cubic else 0


def shift_rows(images: Images, shift: Float[Tensor, "B H"], cubic: bool, fill: Fill) -> Images:
    """Row y of the result is row y of the picture moved left by shift[y] pixels.

    The fraction of the shift is the same along a row, so each row is fetched once and its neighbours
    are slices of what was fetched.
    """
    width = images.shape[3]
    base = shift.floor()
    weights = _weights(shift - base, cubic, -1)
    taps = weights.shape[-1]
    span = torch.arange(width + taps - 1, device=images.device) + _first(cubic)
    index = (base.long()[:, None, :, None] + span).clamp(0, width - 1)
    fetched = images.gather(3, index.expand(-1, 3, -1, -1)).float()
    out = fetched[..., :width] * weights[:, None, :, None, 0]
    for tap in range(1, taps):
        out.addcmul_(fetched[..., tap : tap + width], weights[:, None, :, None, tap])
    centre = torch.arange(width, device=images.device) + 0.5 + shift[:, None, :, None]
    return _filled(out, (centre >= 0) & (centre < width), fill)


def shift_columns(images: Images, shift: Float[Tensor, "B W"], cubic: bool, fill: Fill) -> Images:
    """Column x of the result is column x of the picture moved up by shift[x] pixels."""
    height = images.shape[2]
    base = shift.floor()
    weights = _weights(shift - base, cubic, -1)
    taps = weights.shape[-1]
    span = torch.arange(height + taps - 1, device=images.device) + _first(cubic)
    index = (base.long()[:, None, None, :] + span[:, None]).clamp(0, height - 1)
    fetched = images.gather(2, index.expand(-1, 3, -1, -1)).float()
    out = fetched[:, :, :height] * weights[:, None, None, :, 0]
    for tap in range(1, taps):
        out.addcmul_(fetched[:, :, tap : tap + height], weights[:, None, None, :, tap])
    centre = torch.arange(height, device=images.device)[:, None] + 0.5 + shift[:, None, None, :]
    return _filled(out, (centre >= 0) & (centre < height), fill)


def sample_plane(
    images: Images, x: Float[Tensor, "B H W"], y: Float[Tensor, "B H W"], cubic: bool, fill: Fill
) -> Images:
    """Each pixel from (x, y) anywhere in its picture; edge coordinates, 0 is the left or upper edge."""
    height, width = images.shape[2:]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    if not cubic:
        # Here torch's sampler follows Pillow's rule, and is one kernel.
        grid = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], -1)
        out = F.grid_sample(images.float(), grid, "bilinear", "border", align_corners=False)
        return _filled(out, inside[:, None], fill)
    left, top = (x - 0.5).floor(), (y - 0.5).floor()
    # Taps are the outermost dimension: torch is slow where the innermost has four entries.
    x_weights, y_weights = _weights(x - 0.5 - left, True, 0), _weights(y - 0.5 - top, True, 0)
    # With two columns and rows repeated on each side, the sixteen neighbours lie at fixed distances.
    planes = F.pad(images.float(), (2, 2, 2, 2), mode="replicate").flatten(2)
    pitch = width + 4
    first = (top.long() + 1).clamp_(0, height) * pitch + (left.long() + 1).clamp_(0, width)
    first = first.flatten(1)[:, None]
    out = torch.zeros(images.shape, device=images.device)
    for row, row_weight in enumerate(y_weights):
        for column, weight in enumerate(x_weights):
            place = (first + (row * pitch + column)).expand(-1, 3, -1)
            out.addcmul_(planes.gather(2, place).view(images.shape), (row_weight * weight)[:, None])
    return _filled(out, inside[:, None], fill)


def _centres(length: int, images: Images) -> Float[Tensor, " n"]:
    return torch.arange(length, device=images.device, dtype=torch.float32) + 0.5


def shear_x(images: Images, factor: Factor, cubic: bool, fill: Fill) -> Images:
    """Move each row sideways by `factor` times its distance from the top."""
    return shift_rows(images, factor[:, None] * _centres(images.shape[2], images), cubic, fill)


def shear_y(images: Images, factor: Factor, cubic: bool, fill: Fill) -> Images:
    """Move each column up by `factor` times its distance from the left."""
    return shift_columns(images, factor[:, None] * _centres(images.shape[3], images), cubic, fill)


def translate_x(images: Images, factor: Factor, cubic: bool, fill: Fill) -> Images:
    """Move left by `factor` times the width."""
    height, width = images.shape[2:]
    return shift_rows(images, (factor * width)[:, None].expand(-1, height), cubic, fill)


def translate_y(images: Images, factor: Factor, cubic: bool, fill: Fill) -> Images:
    """Move up by `factor` times the height."""
    height, width = images.shape[2:]
    return shift_columns(images, (factor * height)[:, None].expand(-1, width), cubic, fill)


def rotate(images: Images, factor: Factor, cubic: bool, fill: Fill) -> Images:
    """Turn by `factor` degrees against the clock about the middle."""
    height, width = images.shape[2:]
    dx = (_centres(width, images) - width / 2)[None, None, :]
    dy = (_centres(height, images) - height / 2)[None, :, None]
    angle = (-factor * (math.pi / 180))[:, None, None]
    cos, sin = angle.cos(), angle.sin()
    x, y = cos * dx + sin * dy + width / 2, cos * dy - sin * dx + height / 2
    return sample_plane(images, x, y, cubic, fill)
