"""Heads of a token, and rotary position embedding: cosines and sines for each token that rotate q and k."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.ops.dispatch import in_dtype


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


class Rotation(NamedTuple):
    """Cosines and sines for each token and channel of a head."""

    cos: Float[Tensor, "N K"]
    sin: Float[Tensor, "N K"]


def rotate(x: Float[Tensor, "B H N K"], rotation: Rotation) -> Float[Tensor, "B H N K"]:
    """Rotate each pair of neighbouring channels by its token's angle."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return in_dtype(x * rotation.cos + turned * rotation.sin, x.dtype)


def _grid_angles(width: int, rows: int, theta: float) -> Float[Tensor, "N K"]:
    """Angles on a square grid: half of the channels rotate by the row, the others by the column."""
    frequency = theta ** (-torch.arange(0, width // 2, 2, dtype=torch.float64) / (width // 2))
    angle = torch.outer(torch.arange(rows, dtype=torch.float64), frequency).repeat_interleave(2, dim=-1)
    row = angle[:, None, :].expand(rows, rows, -1)
    column = angle[None, :, :].expand(rows, rows, -1)
    return torch.cat([row, column], dim=-1).flatten(0, 1)


class Rope2d(nn.Module):
    """Rotary position embedding on a square grid of patches, with registers on a small grid of their own.

    Tokens come in the order queries, registers, patches; queries (cls) are not rotated. Patches use
    `theta`, registers `register_theta`, as in ViT-5.

    >>> rotation = Rope2d(64, grid=14, queries=1)()
    >>> rotation.cos.shape, rotation.sin.shape
    (torch.Size([197, 64]), torch.Size([197, 64]))

    Papers: Su et al. 2021, arXiv:2104.09864; ViT-5, arXiv:2602.08071.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_width: int,
        grid: int,
        queries: int = 0,
        registers: int = 0,
        theta: float = 1e4,
        register_theta: float = 100.0,
    ) -> None:
        super().__init__()
        if head_width % 4:
            raise ConfigError(f"rope needs dim / heads divisible by 4, not {head_width}; change dim or heads")
        if math.isqrt(registers) ** 2 != registers:
            raise ConfigError(f"rope puts registers on a square grid; registers={registers} is not a square")
        self.head_width, self.queries, self.registers = head_width, queries, registers
        self.theta, self.register_theta = theta, register_theta
        self.set_grid(grid)

    def set_grid(self, grid: int) -> None:
        self.grid = grid
        tokens = self.queries + self.registers + grid * grid
        empty = self.cos.new_empty if hasattr(self, "cos") else torch.empty
        self.register_buffer("cos", empty(tokens, self.head_width), persistent=False)
        self.register_buffer("sin", empty(tokens, self.head_width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables; they follow from the sizes alone and are not saved."""
        angles = torch.cat(
            [
                torch.zeros(self.queries, self.head_width, dtype=torch.float64),
                _grid_angles(self.head_width, math.isqrt(self.registers), self.register_theta),
                _grid_angles(self.head_width, self.grid, self.theta),
            ]
        )
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self) -> Rotation:
        return Rotation(self.cos, self.sin)

    def flop_count(self, heads: int) -> int:
        """Two multiplications for each channel of q and of k, in one block."""
        return 2 * 2 * heads * self.cos.shape[0] * self.cos.shape[1]
