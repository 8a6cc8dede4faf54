"""Pixels as 32-bit words: red, green, blue and a byte that is not used.

A device fetches a word as quickly as a byte, so a resize or a rotation that reads words needs one
index and one fetch where planes need three. `word_bytes` of a word are numbers to compute with.
"""

from __future__ import annotations

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor


def as_words(pixels: UInt8[Tensor, "*shape 3"]) -> Int32[Tensor, "*shape"]:
    """RGB bytes, innermost, as words; the fourth byte is zero."""
    out = torch.zeros((*pixels.shape[:-1], 4), dtype=torch.uint8, device=pixels.device)
    out[..., :3] = pixels
    return join_bytes(out)


def join_bytes(parts: UInt8[Tensor, "*shape 4"]) -> Int32[Tensor, "*shape"]:
    """Four bytes each as one word; nothing is copied."""
    return parts.view(torch.int32).squeeze(-1)


def word_bytes(words: Int32[Tensor, "*shape"]) -> UInt8[Tensor, "*shape 4"]:
    """The four bytes of each word; nothing is copied."""
    return words.unsqueeze(-1).view(torch.uint8)


def as_planes(words: Int32[Tensor, "B H W"]) -> UInt8[Tensor, "B 3 H W"]:
    """Pictures of words as planes of red, green and blue."""
    return word_bytes(words)[..., :3].permute(0, 3, 1, 2).contiguous()
