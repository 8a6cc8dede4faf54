"""Arms of a comparison: the scores of a variant over its seeds, and the runs that ended without one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fathoms.compare.statistics import wilson

DIGITS = {"top1": 2, "loss": 4}
"""Decimals of each score."""
MOST_LISTED = 4
"""Arms that a sentence names; of more it names three."""


@dataclass(frozen=True)
class Metric:
    """The score that arms are compared by.

    Args:
        name: Its key in results.json.
        unit: How a difference is written.
        sign: 1 if more is better, -1 if less is.
        chance: The score of a guess, which a diverged run is given where it must count.
        rounding: Least variance over seeds, that of the score's rounding; 0 where it is not rounded.
    """

    name: str
    unit: str
    sign: int
    chance: float
    rounding: float = 0.0

    @property
    def digits(self) -> int:
        """Decimals that a score is written with."""
        return DIGITS[self.name]


@dataclass(frozen=True)
class Arm:
    """The scores of one variant over its seeds.

    Args:
        name: As the plan calls it.
        scores: Seed and score of every run that ended, in the order of seeds.
        diverged: Runs whose numbers stopped being finite.
        failed: Runs that ended with an error, which is none of the variant's numbers.
        stalled: Runs that ended within two standard errors of guessing; they are among the scores.
        settings: What makes the variant, by option.
        correct: Whether each held-out image was classified correctly, a row a score; None if not known of all of them.
    """

    name: str
    scores: tuple[tuple[int, float], ...]
    diverged: int = 0
    failed: int = 0
    stalled: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    correct: np.ndarray | None = field(default=None, compare=False)

    @property
    def values(self) -> list[float]:
        """The scores alone."""
        return [score for _, score in self.scores]

    @property
    def ended(self) -> int:
        """Runs that say something about the variant: all but failed ones."""
        return len(self.scores) + self.diverged

    @property
    def lost(self) -> bool:
        """Whether every run that ended diverged."""
        return self.diverged > 0 and not self.scores

    def mean(self) -> float:
        """Over the runs that did not diverge."""
        return sum(self.values) / len(self.scores) if self.scores else math.nan

    def mean_with_diverged(self, chance: float) -> float:
        """Over all runs, diverged ones at the score of a guess."""
        return (sum(self.values) + self.diverged * chance) / self.ended if self.ended else math.nan

    def divergence(self) -> tuple[float, float]:
        """Wilson's interval of the share of runs that diverge."""
        return wilson(self.diverged, self.ended)


def lost_arms(arms: Sequence[Arm]) -> str:
    """A clause on arms of which every run diverged; empty where there is none."""
    gone = [arm for arm in arms if arm.lost]
    if len(gone) > MOST_LISTED:
        return f"{listed([arm.name for arm in gone])} diverged in all of their runs"
    return " and ".join(f"{arm.name} diverged in {arm.diverged} of {arm.ended}" for arm in gone)


def listed(names: Sequence[str]) -> str:
    """Names in a row; those of several options, which have commas themselves, in quotes."""
    shown = [repr(name) if "," in name else name for name in names]
    return (
        ", ".join(shown)
        if len(shown) <= MOST_LISTED
        else f"{', '.join(shown[:3])} and {len(shown) - 3} others"
    )
