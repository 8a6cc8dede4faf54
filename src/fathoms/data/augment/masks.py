"""Masks of rectangles, for erasing and cutmix."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def inside_boxes(box: Int[Tensor, "*shape 4"], height: int, width: int) -> Bool[Tensor, "*shape H W"]:
    """Mask of the pixels inside each box: rows from top up to bottom, columns from left up to right."""
    top, bottom, left, right = box[..., None].unbind(-2)
    y, x = torch.arange(height, device=box.device), torch.arange(width, device=box.device)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    return rows[..., None] & columns[..., None, :]
