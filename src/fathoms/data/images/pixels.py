"""Pixels: resize on the CPU, and buffers of images of different sizes, whose boxes are cut out and resized.

In a buffer RGB is packed into 32-bit words: a device fetches a word as quickly as a byte, so a resize that reads
packed RGB needs one index and one fetch where planes need three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int32, UInt8
from numpy.lib.stride_tricks import as_strided
from torch import Tensor


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


def evaluation_geometry(height: int, width: int, size: int, crop_pct: float) -> tuple[int, int, int, int]:
    """Size after the resize, and the corner of the centre crop: (height, width, top, left).

    The shorter side becomes size / crop_pct, then the middle size x size pixels are kept; the
    rounding is torchvision's, which timm's evaluation uses.
    """
    short = math.floor(size / crop_pct)
    if height <= width:
        new_h, new_w = short, int(short * width / height)
    else:
        new_h, new_w = int(short * height / width), short
    return new_h, new_w, round((new_h - size) / 2.0), round((new_w - size) / 2.0)


def evaluation_pixels(
    pixels: UInt8[np.ndarray, "h w 3"], size: int, crop_pct: float = 0.875, cubic: bool = True
) -> UInt8[Tensor, "3 size size"]:
    """Resize the shorter side to size / crop_pct and keep the centre; black where the image is too small."""
    height, width, top, left = evaluation_geometry(pixels.shape[0], pixels.shape[1], size, crop_pct)
    planes = resize(pixels, height, width, cubic)
    return as_planes(cut(planes.permute(1, 2, 0).numpy(), (top, left, size, size)))


def cut(image: UInt8[np.ndarray, "h w 3"], box: Sequence[int]) -> UInt8[np.ndarray, "height width 3"]:
    """The box (top, left, height, width) of an image; black outside of it."""
    (top, left, height, width), (rows, columns) = box, image.shape[:2]
    inside = image[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    if inside.shape[:2] == (height, width):
        return inside
    out = np.zeros((height, width, 3), np.uint8)
    out[max(-top, 0) : max(rows - top, 0), max(-left, 0) : max(columns - left, 0)] = inside
    return out


# Gives uninitialised memory for bytes of some shape.
Allocate = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class PixelLayout:
    """Where each image and its crop box lie in a pixel buffer: arrays of length B on the host.

    `offset` counts pixels from the start of the buffer, `pitch` pixels from row to row; the box
    (top, left, height, width) may reach outside the image of `size` (h, w): the pixels there are black.
    """

    offset: np.ndarray
    pitch: np.ndarray
    size: np.ndarray
    box: np.ndarray
    flip: np.ndarray
    cubic: np.ndarray


def join_layouts(layouts: Sequence[PixelLayout], lengths: Sequence[int]) -> PixelLayout:
    """The layout of buffers of `lengths` pixels, put one after another."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    offsets = [layout.offset + start for layout, start in zip(layouts, starts, strict=True)]
    names = ("pitch", "size", "box", "flip", "cubic")
    rest = (np.concatenate([getattr(layout, name) for layout in layouts]) for name in names)
    return PixelLayout(np.concatenate(offsets), *rest)


def ragged(images: Sequence[np.ndarray]) -> tuple[UInt8[np.ndarray, "n 3"], np.ndarray, np.ndarray]:
    """Put (h, w, 3) images one after another: (pixels, offset of each, size of each)."""
    sizes = np.array([image.shape[:2] for image in images], np.int64)
    ends = np.cumsum(sizes[:, 0] * sizes[:, 1])
    offsets = np.concatenate([[0], ends[:-1]])
    flat = np.empty((int(ends[-1]), 3), np.uint8)
    for image, offset, end in zip(images, offsets, ends, strict=True):
        flat[offset:end].reshape(image.shape)[...] = image
    return flat, offsets, sizes


def as_words(pixels: UInt8[Tensor, "*shape 3"]) -> Int32[Tensor, "*shape"]:
    """RGB bytes, innermost, as words of red, green, blue and a zero byte."""
    out = torch.zeros((*pixels.shape[:-1], 4), dtype=torch.uint8, device=pixels.device)
    out[..., :3] = pixels
    return out.view(torch.int32).squeeze(-1)


def words_to_planes(words: Int32[Tensor, "B H W"]) -> UInt8[Tensor, "B 3 H W"]:
    """Images of words, copied, as planes of red, green and blue."""
    return words.unsqueeze(-1).view(torch.uint8).movedim(-1, 1)[:, :3].contiguous()


def resize_boxes(
    pixels: Int32[Tensor, " n"], layout: PixelLayout, size: int
) -> UInt8[Tensor, "B 3 size size"]:
    """Every box of `layout`, resized to size x size with antialiasing, flipped where `layout.flip` says so.

    Image by image on the CPU, from where words on another device are fetched: the reference of the kernels.
    """
    channels = pixels.cpu().unsqueeze(-1).view(torch.uint8).numpy()
    out = torch.empty(len(layout.box), 3, size, size, dtype=torch.uint8)
    columns = (values.tolist() for values in vars(layout).values())
    for row, (offset, pitch, (height, width), box, flip, cubic) in enumerate(zip(*columns, strict=True)):
        image = as_strided(channels[offset:], (height, width, 3), (4 * pitch, 4, 1))
        planes = resize(cut(image, box), size, size, cubic)
        out[row] = planes.flip(2) if flip else planes
    return out.to(pixels.device)
