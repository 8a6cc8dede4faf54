"""Protocols of the parts. A family is its protocol and its contract tests, not a base class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from fathoms.parts.rope import Rope2d


@runtime_checkable
class Part(Protocol):
    """A module on tokens that counts its multiplications."""

    def __call__(self, *inputs: Any) -> Tensor:
        """Run the part."""

    def flop_count(self, *sizes: int) -> int:
        """Multiplications on that many tokens."""


@runtime_checkable
class Branch(Part, Protocol):
    """An attention or an MLP: a part that gives its matrices by role, for init rules."""

    def roles(self) -> list[tuple[str, Tensor]]:
        """Each weight matrix with its role, as views that do not track gradients."""

    def ends(self) -> tuple[list[nn.Module], nn.Module]:
        """All linears that read the branch's input, and the one whose output is the branch's output."""

    def modules(self) -> Iterator[nn.Module]:
        """All submodules, itself included."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters."""


@runtime_checkable
class Gate(Protocol):
    """A gate on an attention's output that reads the attention's input."""

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """The gated output."""

    def linears(self) -> list[nn.Module]:
        """The linears that read the attention's input."""

    def flop_count(self, num_tokens: int) -> int:
        """Multiplications on that many tokens."""


@runtime_checkable
class Stem(Protocol):
    """The stage from pixels to tokens."""

    def __call__(self, images: Tensor) -> Tensor:
        """One token for each cell of the grid, row by row."""

    def after_position(self, tokens: Tensor) -> Tensor:
        """The tokens once positions have been added."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters."""

    def flop_count(self, num_tokens: int) -> int:
        """Multiplications for a grid of that many cells."""


@runtime_checkable
class Position(Protocol):
    """A position embedding: what is added to the patches, and the rotation of q and k."""

    @property
    def rope(self) -> Rope2d | None:
        """The rotation of q and k, or None."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """The patches with their positions added."""

    def set_grid(self, grid: int) -> None:
        """Resize to another grid of patches."""

    def flop_count(self, depth: int) -> int:
        """Multiplications per image in a network of `depth` blocks."""


@runtime_checkable
class Readout(Protocol):
    """The stage between the blocks and the heads."""

    travelling: int
    joins: int

    def start(self, tokens: Tensor) -> Tensor:
        """The tokens that enter the first block."""

    def finish(self, tokens: Tensor, registers: int) -> Tensor:
        """The tokens after the read-out's own work."""

    def read(self, tokens: Tensor, registers: int) -> Tensor:
        """Those of `finish`'s tokens that `pool` looks at, in the same order."""

    def pool(self, tokens: Tensor, registers: int) -> Tensor:
        """The vectors the heads read, one for each."""

    def flop_count(self, num_tokens: int) -> int:
        """Multiplications over that many patches."""
