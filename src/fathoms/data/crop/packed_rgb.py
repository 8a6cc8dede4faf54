"""Pixels as 32-bit words: red, green, blue and a byte that is not used.

A device fetches a word as quickly as a byte, so a resize or a rotation that reads words needs one
index and one fetch where planes need three. Sums are kept as planes again: an innermost dimension of
three is slow on every device.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor


def as_words(pixels: UInt8[Tensor, "*shape 3"]) -> Int32[Tensor, "*shape"]:
    """RGB bytes, innermost, as words; the fourth byte is zero."""
    if torch.compiler.is_compiling():
        # The compiler lays tensors out as it likes, and bytes that are far apart cannot be seen as words.
        red, green, blue = pixels.to(torch.int32).unbind(-1)
        return red | green << 8 | blue << 16
    out = torch.zeros((*pixels.shape[:-1], 4), dtype=torch.uint8, device=pixels.device)
    out[..., :3] = pixels
    return out.view(torch.int32).squeeze(-1)


def word_planes(words: Int32[Tensor, "*shape"]) -> UInt8[Tensor, "3 *shape"]:
    """Red, green and blue of words, as planes; nothing is copied."""
    if torch.compiler.is_compiling():
        return torch.stack([words >> shift & 255 for shift in (0, 8, 16)]).to(torch.uint8)
    return words.unsqueeze(-1).view(torch.uint8).movedim(-1, 0)[:3]


def as_planes(words: Int32[Tensor, "B H W"]) -> UInt8[Tensor, "B 3 H W"]:
    """Pictures of words, copied, as planes of red, green and blue."""
    return word_planes(words).transpose(0, 1).contiguous()


def add_weighted(
    total: Float[Tensor, "3 *shape"], planes: UInt8[Tensor, "3 *shape"], weight: Float[Tensor, "*ones"]
) -> None:
    """Add weight * planes to `total`."""
    if total.device.type == "cpu":
        # A GPU converts bytes as it reads them; a CPU is twice as quick if that is a pass of its own.
        planes = planes.to(torch.float32, memory_format=torch.contiguous_format)
    total.addcmul_(planes, weight)
