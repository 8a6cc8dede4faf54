"""Facts about the optimizers that a recipe names, for whoever counts or checks them without building one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw", "lamb", "muon", "sgd", "momentum"]

BETAS = (0.9, 0.999)
"""Decay of the two moments of Adam and LAMB."""
EPS = 1e-8
"""Adam's term in the denominator."""
LAMB_EPS = 1e-6
"""LAMB's, as in timm."""
MUON_STRETCH = 0.2
"""Length of Muon's steps over the square root of the longer side, at which they are as long as AdamW's."""


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer.

    Args:
        moments: Tensors of a parameter's shape that it keeps.
        counts: Whether it keeps a counter for each parameter, too.
        betas: Whether it takes betas and an epsilon.
        momentum: Whether it takes a momentum.
    """

    moments: int
    counts: bool = False
    betas: bool = False
    momentum: bool = False


OPTIMIZER_FACTS: dict[OptimizerName, OptimizerFacts] = {
    "adamw": OptimizerFacts(2, counts=True, betas=True),
    "lamb": OptimizerFacts(2, betas=True),
    "sgd": OptimizerFacts(1, momentum=True),
    "momentum": OptimizerFacts(1, momentum=True),
    # On the matrices inside blocks; the others are AdamW's.
    "muon": OptimizerFacts(1, betas=True, momentum=True),
}
WITH_BETAS = tuple(name for name, facts in OPTIMIZER_FACTS.items() if facts.betas)
WITH_MOMENTUM = tuple(name for name, facts in OPTIMIZER_FACTS.items() if facts.momentum)


def takes_muon(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix inside a block: not a stem, a head, a token or a position.

    >>> takes_muon("blocks.0.mlp.fc1.weight", (64, 16)), takes_muon("head.weight", (10, 16))
    (True, False)
    """
    return len(shape) == 2 and "blocks" in name.split(".")


def state_values(opt: OptimizerName, parameters: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Numbers that an optimizer keeps for parameters, given by name and shape.

    >>> head = ("head.weight", (10, 16))
    >>> state_values("sgd", [head]), state_values("adamw", [head]), state_values("muon", [head])
    (160, 321, 321)
    """
    total = 0
    for name, shape in parameters:
        facts = OPTIMIZER_FACTS["adamw" if opt == "muon" and not takes_muon(name, shape) else opt]
        total += facts.moments * math.prod(shape) + facts.counts
    return total
