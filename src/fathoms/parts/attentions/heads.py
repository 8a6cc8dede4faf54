"""Attention heads: their width, and splitting and merging the channels of tokens."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from fathoms.errors import ConfigError


def head_width(dim: int, heads: int) -> int:
    """Channels per head; `heads` must divide `dim`."""
    if heads < 1 or dim % heads:
        raise ConfigError(f"dim={dim} is not divisible by heads={heads}")
    return dim // heads


def split_heads(x: Float[Tensor, "B N D"], heads: int) -> Float[Tensor, "B H N K"]:
    """Each head's channels of every token."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "B H N K"]) -> Float[Tensor, "B N D"]:
    """The inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)
