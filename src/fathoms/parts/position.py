"""Where a patch is: tables added to the tokens, and rotations of q and k."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.parts.init import STD, exempt_from_decay
from fathoms.registry import Registry

POSITIONS: Registry[nn.Module] = Registry("position")

ROTARY = "rotary"


class Rotation(NamedTuple):
    """Cosines and sines for each token and channel of a head."""

    cos: Float[Tensor, "N K"]
    sin: Float[Tensor, "N K"]


def rotate(x: Float[Tensor, "B H N K"], rotation: Rotation) -> Float[Tensor, "B H N K"]:
    """Turn each pair of neighbouring channels by its token's angle."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x * rotation.cos + turned * rotation.sin).to(x.dtype)


def _grid_angles(width: int, rows: int, theta: float) -> Float[Tensor, "N K"]:
    """Angles on a square grid: half of the channels turn with the row, the others with the column."""
    frequency = theta ** (-torch.arange(0, width // 2, 2, dtype=torch.float64) / (width // 2))
    angle = torch.outer(torch.arange(rows, dtype=torch.float64), frequency).repeat_interleave(2, dim=-1)
    row = angle[:, None, :].expand(rows, rows, -1)
    column = angle[None, :, :].expand(rows, rows, -1)
    return torch.cat([row, column], dim=-1).flatten(0, 1)


class Rope2d(nn.Module):
    """Rotary positions on a square grid of patches, with registers on a small grid of their own.

    Tokens come in the order queries, registers, patches; queries (cls) are not rotated. Patches use
    `theta`, registers `register_theta`, as in ViT-5.

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
            raise ConfigError(
                f"rope needs dim / heads divisible by 4, not {head_width}; change model.dim or model.heads"
            )
        if math.isqrt(registers) ** 2 != registers:
            raise ConfigError(
                f"rope puts registers on a square grid; model.registers={registers} is no square"
            )
        self.head_width, self.queries, self.registers = head_width, queries, registers
        self.theta, self.register_theta = theta, register_theta
        self.set_grid(grid)

    def set_grid(self, grid: int) -> None:
        """Take patches on another grid from now on."""
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
        """The rotation of every token."""
        return Rotation(self.cos, self.sin)

    def flop_count(self, heads: int) -> int:
        """Two multiplications for each channel of q and of k, in one block."""
        return 2 * 2 * heads * self.cos.shape[0] * self.cos.shape[1]


def resampling(old: int, new: int) -> Float[Tensor, "new old"]:
    """The matrix that resizes a row of `old` places to `new`: bicubic, antialiased."""
    identity = torch.eye(old)[None, None]
    return F.interpolate(identity, size=(new, old), mode="bicubic", antialias=True)[0, 0]


@POSITIONS.add("learned_rope", ROTARY, "A learned vector added to each patch, and rotations of q and k.")
@POSITIONS.add("learned")
class LearnedPosition(nn.Module):
    """A learned vector for each place, added to the patch there.

    On another grid than its own (`set_grid`) the table is resized at every call and stays what is learned, so
    that optimizer, average and checkpoints keep their shapes.
    """

    resample: Tensor | None

    def __init__(self, dim: int, grid: int) -> None:
        super().__init__()
        self.own_grid = grid
        self.table = nn.Parameter(torch.empty(grid * grid, dim))
        self.register_buffer("resample", None, persistent=False)
        self.reset_parameters()

    def set_grid(self, grid: int) -> None:
        """Take patches on another grid from now on."""
        # Two products with a fixed matrix: unlike torch's own backward on a GPU, the same bits every time.
        matrix = None if grid == self.own_grid else resampling(self.own_grid, grid).to(self.table.device)
        self.register_buffer("resample", matrix, persistent=False)

    def _resized(self) -> Float[Tensor, "N D"]:
        if self.resample is None:
            return self.table
        square = self.table.float().unflatten(0, (self.own_grid, self.own_grid))
        rows = torch.einsum("rh,hwd->rwd", self.resample, square)
        return torch.einsum("cw,rwd->rcd", self.resample, rows).flatten(0, 1).to(self.table.dtype)

    def reset_parameters(self) -> None:
        """Start from the truncated normal; positions take no weight decay."""
        nn.init.trunc_normal_(self.table, std=STD)
        exempt_from_decay(self.table)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Add each place's vector."""
        return (tokens + self._resized()).to(tokens.dtype)


@POSITIONS.add("sincos")
class SinCosPosition(nn.Module):
    """Fixed sines and cosines of row and column, added to the patch there.

    Papers: Vaswani et al. 2017, arXiv:1706.03762; in this 2-D form Chen et al. 2021, arXiv:2104.02057.
    """

    table: Tensor

    def __init__(self, dim: int, grid: int) -> None:
        super().__init__()
        if dim % 4:
            raise ConfigError(f"position 'sincos' needs a width divisible by 4; model.dim={dim} is not")
        self.dim = dim
        self.set_grid(grid)

    def set_grid(self, grid: int) -> None:
        """Take patches on another grid from now on."""
        self.grid = grid
        empty = self.table.new_empty if hasattr(self, "table") else torch.empty
        self.register_buffer("table", empty(grid * grid, self.dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the table; it follows from the sizes alone and is not saved."""
        frequency = 1e4 ** (-torch.arange(self.dim // 4, dtype=torch.float64) / (self.dim // 4))
        angle = torch.outer(torch.arange(self.grid, dtype=torch.float64), frequency)
        waves = torch.cat([angle.sin(), angle.cos()], dim=-1)
        column = waves[None, :, :].expand(self.grid, self.grid, -1)
        row = waves[:, None, :].expand(self.grid, self.grid, -1)
        self.table.copy_(torch.cat([column, row], dim=-1).flatten(0, 1))

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Add each place's vector."""
        return (tokens + self.table).to(tokens.dtype)


@POSITIONS.add("rope", ROTARY, "Rotations of q and k by row and column; nothing is added.")
@POSITIONS.add("none")
class NoPosition(nn.Module):
    """Nothing is added: places are told by rotation ("rope"), or not at all."""

    def __init__(self, dim: int, grid: int) -> None:
        super().__init__()
        self.dim, self.grid = dim, grid

    def set_grid(self, grid: int) -> None:
        """Take patches on another grid from now on."""
        self.grid = grid

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Return the tokens."""
        return tokens
