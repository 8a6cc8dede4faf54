"""Pixel buffers: images of different sizes one after another, and RGB packed into 32-bit words.

A device fetches a word as quickly as a byte, so a resize or a rotation that reads packed RGB needs one index and one
fetch where planes need three. Sums are kept as planes again: an innermost dimension of three is slow on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

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


def word_planes(words: Int32[Tensor, "*shape"]) -> UInt8[Tensor, "3 *shape"]:
    """Red, green and blue of words, as planes; nothing is copied."""
    return words.unsqueeze(-1).view(torch.uint8).movedim(-1, 0)[:3]


def words_to_planes(words: Int32[Tensor, "B H W"]) -> UInt8[Tensor, "B 3 H W"]:
    """Images of words, copied, as planes of red, green and blue."""
    return word_planes(words).transpose(0, 1).contiguous()


def add_weighted(
    total: Float[Tensor, "3 *shape"], planes: UInt8[Tensor, "3 *shape"], weight: Float[Tensor, "*ones"]
) -> None:
    """Add weight * planes to `total`."""
    if total.device.type == "cpu":
        # A GPU converts bytes as it reads them; a CPU is twice as quick if that is a pass of its own.
        planes = planes.to(torch.float32, memory_format=torch.contiguous_format)
    total.addcmul_(planes, weight)
