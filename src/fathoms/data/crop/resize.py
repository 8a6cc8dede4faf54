"""Antialiased resize on the CPU: uint8 in, uint8 out, torch's kernel, Pillow's result within rounding."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from fathoms.data.crop.random_crop import evaluation_geometry


def as_planes(pixels: UInt8[np.ndarray, "h w 3"]) -> UInt8[Tensor, "3 h w"]:
    """View HWC pixels as a CHW tensor; copied only where numpy has negative strides (EXIF rotations)."""
    if any(stride < 0 for stride in pixels.strides) or not pixels.flags.writeable:
        pixels = pixels.copy()
    return torch.from_numpy(pixels).permute(2, 0, 1)


def resize(
    pixels: UInt8[np.ndarray, "h w 3"], height: int, width: int, cubic: bool
) -> UInt8[Tensor, "3 height width"]:
    """Resize with an antialiasing bilinear or bicubic filter."""
    planes = as_planes(pixels)
    if planes.shape[1:] == (height, width):
        return planes
    mode = "bicubic" if cubic else "bilinear"
    return F.interpolate(planes[None], (height, width), mode=mode, antialias=True)[0]


def evaluation_pixels(
    pixels: UInt8[np.ndarray, "h w 3"], size: int, crop_pct: float = 0.875, cubic: bool = True
) -> UInt8[Tensor, "3 size size"]:
    """Resize the shorter side to size / crop_pct and keep the centre; black where the image is too small."""
    height, width, top, left = evaluation_geometry(pixels.shape[0], pixels.shape[1], size, crop_pct)
    planes = resize(pixels, height, width, cubic)
    if top >= 0 and left >= 0:
        return planes[:, top : top + size, left : left + size]
    # A crop_pct above 1 asks for more than there is.
    out = torch.zeros(3, size, size, dtype=torch.uint8)
    put_y, put_x = max(0, -top), max(0, -left)
    part = planes[:, max(0, top) : max(0, top) + size, max(0, left) : max(0, left) + size]
    out[:, put_y : put_y + part.shape[1], put_x : put_x + part.shape[2]] = part
    return out
