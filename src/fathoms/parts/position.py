"""Position embeddings: tables added to the patch tokens, and rotations of q and k.

A position adds to the patches when called, and holds in `rope` the rotation of q and k, or None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.ops.dispatch import in_dtype, widened
from fathoms.parts.linears import STD
from fathoms.parts.protocols import Position
from fathoms.parts.rope import Rope2d, head_width
from fathoms.registry import Registry


@dataclass(frozen=True)
class Traits:
    """Properties of a position that the model builder reads.

    Args:
        adds: Whether something is added to the patches.
        rotary: Whether it rotates q and k; it is then built with `heads`, `queries` and `registers` too.
    """

    adds: bool = True
    rotary: bool = False


POSITIONS: Registry[Position, Traits] = Registry("position", default=Traits())


class Resample(nn.Module):
    """Resize a square table from `old` x `old` places to `new` x `new`: bicubic, antialiased.

    Two products with a fixed matrix: unlike torch's own backward on a GPU, the same bits every time.
    """

    matrix: Tensor

    def __init__(self, old: int, new: int) -> None:
        super().__init__()
        self.old, self.new = old, new
        self.register_buffer("matrix", torch.empty(new, old, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the matrix, which resizes a row; it follows from the sizes alone and is not saved."""
        identity = torch.eye(self.old, dtype=torch.float32)[None, None]
        resized = F.interpolate(identity, size=(self.new, self.old), mode="bicubic", antialias=True)
        self.matrix.copy_(resized[0, 0])

    def forward(self, table: Float[Tensor, "N D"]) -> Float[Tensor, "M D"]:
        """The table on the new grid."""
        square = widened(table).unflatten(0, (self.old, self.old))
        matrix = self.matrix.to(square.dtype)
        rows = torch.einsum("rh,hwd->rwd", matrix, square)
        return torch.einsum("cw,rwd->rcd", matrix, rows).flatten(0, 1).to(table.dtype)


@POSITIONS.add("learned")
class LearnedPosition(nn.Module):
    """A learned vector per grid cell, added to the patch there.

    On another grid than its own (`set_grid`) the table is resized at every call; the parameter keeps its shape,
    and so do the optimizer, the weight average and checkpoints.

    >>> LearnedPosition(192, grid=14)(torch.randn(2, 196, 192)).shape
    torch.Size([2, 196, 192])
    """

    exempt_from_decay = ("table",)

    def __init__(self, dim: int, grid: int) -> None:
        super().__init__()
        self.rope: Rope2d | None = None
        self.own_grid = grid
        self.table = nn.Parameter(torch.empty(grid * grid, dim))
        self.resample: Resample | None = None
        self.reset_parameters()

    def set_grid(self, grid: int) -> None:
        own = grid == self.own_grid
        self.resample = None if own else Resample(self.own_grid, grid).to(self.table.device)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=STD)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        table = self.table if self.resample is None else self.resample(self.table)
        return in_dtype(tokens + table, tokens.dtype)

    def flop_count(self, depth: int) -> int:
        return 0 * depth


@POSITIONS.add("learned_rope", Traits(rotary=True))
class LearnedRotaryPosition(LearnedPosition):
    """A learned vector added to each patch, and rotations of q and k.

    Args:
        dim: Width of a token.
        grid: Patches along a side.
        heads: Number of attention heads.
        queries: Query tokens in front of the registers.
        registers: Register tokens in front of the patches.

    >>> LearnedRotaryPosition(192, grid=14, heads=3)(torch.randn(2, 196, 192)).shape
    torch.Size([2, 196, 192])

    Paper: ViT-5, arXiv:2602.08071.
    """

    def __init__(self, dim: int, grid: int, heads: int, queries: int = 0, registers: int = 0) -> None:
        super().__init__(dim, grid)
        self.heads = heads
        self.rope = Rope2d(head_width(dim, heads), grid, queries, registers)

    def set_grid(self, grid: int) -> None:
        super().set_grid(grid)
        cast(Rope2d, self.rope).set_grid(grid)

    def flop_count(self, depth: int) -> int:
        return depth * cast(Rope2d, self.rope).flop_count(self.heads)


@POSITIONS.add("sincos")
class SinCosPosition(nn.Module):
    """Fixed sines and cosines of row and column, added to the patch there.

    >>> SinCosPosition(192, grid=14)(torch.randn(2, 196, 192)).shape
    torch.Size([2, 196, 192])

    Papers: Vaswani et al. 2017, arXiv:1706.03762; in this 2-D form Chen et al. 2021, arXiv:2104.02057.
    """

    table: Tensor

    def __init__(self, dim: int, grid: int) -> None:
        super().__init__()
        if dim % 4:
            raise ConfigError(f"position 'sincos' needs a width divisible by 4; dim={dim} is not")
        self.rope: Rope2d | None = None
        self.dim = dim
        self.set_grid(grid)

    def set_grid(self, grid: int) -> None:
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
        return in_dtype(tokens + self.table, tokens.dtype)

    def flop_count(self, depth: int) -> int:
        return 0 * depth


@POSITIONS.add("rope", Traits(adds=False, rotary=True))
class RotaryPosition(nn.Module):
    """Rotations of q and k by row and column; nothing is added.

    Args:
        dim: Width of a token.
        grid: Patches along a side.
        heads: Number of attention heads.
        queries: Query tokens in front of the registers; they are not rotated.
        registers: Register tokens in front of the patches.

    >>> position = RotaryPosition(192, grid=14, heads=3, queries=1)
    >>> position.rope().cos.shape
    torch.Size([197, 64])

    Paper: Su et al. 2021, arXiv:2104.09864.
    """

    def __init__(self, dim: int, grid: int, heads: int, queries: int = 0, registers: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.rope = Rope2d(head_width(dim, heads), grid, queries, registers)

    def set_grid(self, grid: int) -> None:
        self.rope.set_grid(grid)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        return tokens

    def flop_count(self, depth: int) -> int:
        return depth * self.rope.flop_count(self.heads)


@POSITIONS.add("none", Traits(adds=False))
class NoPosition(nn.Module):
    """No position at all: the model sees a set of patches.

    >>> NoPosition(192, grid=14)(torch.randn(2, 196, 192)).shape
    torch.Size([2, 196, 192])
    """

    def __init__(self, dim: int, grid: int) -> None:
        super().__init__()
        self.rope: Rope2d | None = None
        self.dim, self.grid = dim, grid

    def set_grid(self, grid: int) -> None:
        self.grid = grid

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        return tokens

    def flop_count(self, depth: int) -> int:
        return 0 * depth
