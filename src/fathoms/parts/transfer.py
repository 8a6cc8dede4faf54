"""Transfer over depth and width: a learning rate tuned on a small model, scaled so that it holds on a larger one.

With m_L = depth / base_depth and m_N = dim / base_dim, and alpha the exponent of the method:

| | blocks: matrices | blocks: other parameters | outside of the blocks |
|---|---|---|---|
| branch | m_L^-alpha | | |
| head | | | W x / m_N |
| start, deviation | m_N^-1/2 | 1 | 1 |
| learning rate | m_N^-1 m_L^(alpha - 1) | m_L^(alpha - 1) | 1 |
| weight decay | m_N | 1 | 1 |
| Adam's epsilon | m_N^-1 m_L^-alpha | m_N^-1 m_L^-alpha | m_N^-1 |

Matrices that Muon updates take m_N^-1/2 and m_N^1/2 instead of m_N^-1 and m_N (see `training/muon.py`).

Papers: Dey et al. 2025, arXiv:2505.01618 (CompleteP); Yang et al. 2023, arXiv:2310.02244 (depth-muP).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fathoms.parts.residuals import RESIDUALS

# Depth of the models whose recipes everybody uses: ViT-Ti, -S and -B.
BASE_DEPTH = 12


@dataclass(frozen=True)
class Multipliers:
    """Factors of a parameter's learning rate, weight decay and epsilon, and their formulas."""

    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0
    width: float = 1.0
    """m_N where the learning rate depends on it; Muon's rule is another power of it."""
    why: str = ""


@dataclass(frozen=True)
class Transfer:
    """Ratios of a model to its base: m_L of the depths, m_N of the widths, and the exponent of the depth.

    >>> Transfer(depth=4.0).branch
    0.25
    """

    depth: float = 1.0
    width: float = 1.0
    alpha: float = 1.0

    @property
    def branch(self) -> float:
        """Factor of every residual branch."""
        return self.depth**-self.alpha

    @property
    def start(self) -> float:
        """Factor of the deviation that the matrices of a block start with."""
        return self.width**-0.5

    @property
    def head(self) -> float:
        """Factor of the head's input."""
        return 1 / self.width

    def of(self, name: str, ndim: int) -> Multipliers:
        """The multipliers of the parameter called `name` of a ViT."""
        if name.startswith("readout.blocks."):
            # The blocks of class attention are as many at every depth, and their branches are not scaled.
            return replace(self, depth=1.0)._in_block(name, ndim)
        if name.startswith("blocks."):
            return self._in_block(name, ndim)
        return _shown(Multipliers(eps=1 / self.width), eps=self._formula(width=-1.0))

    def _in_block(self, name: str, ndim: int) -> Multipliers:
        rate, noise = self.alpha - 1, -self.alpha
        # The gains of q and k are shared by the heads, so their gradients do not shrink with the width.
        shared = 0.0 if ".q_norm." in name or ".k_norm." in name else -1.0
        eps = self.depth**noise * self.width**shared
        of_eps = self._formula(noise, shared)
        if ndim < 2:
            return _shown(Multipliers(self.depth**rate, 1.0, eps), lr=self._formula(rate), eps=of_eps)
        values = Multipliers(self.depth**rate / self.width, self.width, eps, self.width)
        return _shown(values, lr=self._formula(rate, -1.0), decay=self._formula(width=1.0), eps=of_eps)

    def _formula(self, depth: float = 0.0, width: float = 0.0) -> str:
        """The powers of m_L and m_N that differ from one."""
        factors = (("m_L", self.depth, depth), ("m_N", self.width, width))
        powers = [(name, power) for name, ratio, power in factors if power and ratio != 1.0]
        return " ".join(name if power == 1 else f"{name}^{power:g}" for name, power in powers)


def _shown(values: Multipliers, **formulas: str) -> Multipliers:
    why = ", ".join(f"{name} x {formula}" for name, formula in formulas.items() if formula)
    return replace(values, why=why)


def transfer_of(
    residual: str, *, depth: int, dim: int, base_depth: int | None = None, base_dim: int | None = None
) -> Transfer:
    """The ratios of a model; one each if its residual method does not transfer.

    Args:
        residual: Name of the residual method.
        depth: Number of blocks.
        dim: Width of a token.
        base_depth: Depth at which the learning rate was tuned; None: 12.
        base_dim: Width at which it was tuned; None: the same width.
    """
    alpha = RESIDUALS.metadata(residual).alpha
    if alpha is None:
        return Transfer()
    return Transfer(depth / (base_depth or BASE_DEPTH), dim / (base_dim or dim), alpha)
