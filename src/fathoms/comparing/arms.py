"""Arms of a comparison: the scores of a variant over its seeds, and the difference of two of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fathoms.comparing.statistics import (
    MIN_SEEDS,
    Difference,
    image_variance,
    least_variances,
    paired,
    welch,
    wilson,
)

DIGITS = {"top1": 2, "loss": 4}
"""Decimals of the scores that training measures."""


@dataclass(frozen=True)
class Metric:
    """The score that arms are compared by.

    Args:
        name: Its key in results.json.
        unit: How a difference is written.
        sign: 1 if more is better, -1 if less is.
        chance: The score of a guess, which a diverged run is given where it must count.
        images: Held-out images that an accuracy is measured on; 0 where their number says nothing of the spread.
        decimals: Of a score of other origin; None takes those of `DIGITS`.
        lost: What the runs did that have no score.
        loses: What an arm does that has more of them.
    """

    name: str
    unit: str
    sign: int
    chance: float
    images: int = 0
    decimals: int | None = None
    lost: str = "diverged"
    loses: str = "diverges"

    @property
    def digits(self) -> int:
        """Decimals that it is written with."""
        return DIGITS[self.name] if self.decimals is None else self.decimals

    def amount(self, value: float) -> str:
        """A difference with its unit."""
        return f"{value:.{self.digits}f} {self.unit}".strip()


@dataclass(frozen=True)
class Arm:
    """The scores of one variant over its seeds.

    Args:
        name: As the plan calls it.
        scores: Seed and score of every run that ended, in the order of seeds.
        diverged: Seeds of the runs whose numbers stopped being finite, or that missed the accuracy they are timed to.
        failed: Seeds of those that ended with an error, which is none of the variant's numbers.
        stalled: Seeds of those that ended no better than one answer for all images; they are among the scores.
        settings: What makes the variant, by option.
        correct: Whether each held-out image was classified correctly, a row a score; None if not known of all of them.
        tuning: Variance that the luck of its tuning adds to its mean.
    """

    name: str
    scores: tuple[tuple[int, float], ...]
    diverged: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    stalled: tuple[int, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    correct: np.ndarray | None = field(default=None, compare=False)
    tuning: float = 0.0

    @functools.cached_property
    def values(self) -> tuple[float, ...]:
        return tuple([score for _, score in self.scores])

    @property
    def ended(self) -> int:
        """Runs that say something about the variant: all but failed ones."""
        return len(self.scores) + len(self.diverged)

    @property
    def lost(self) -> bool:
        """Whether every run that ended diverged."""
        return bool(self.diverged) and not self.scores

    def mean(self) -> float:
        """Over the runs that did not diverge."""
        return sum(self.values) / len(self.scores) if self.scores else math.nan

    def mean_with_diverged(self, chance: float) -> float:
        """Over all runs, diverged ones at this score."""
        return (sum(self.values) + len(self.diverged) * chance) / self.ended if self.ended else math.nan

    def divergence(self) -> tuple[float, float]:
        """Wilson's interval of the share of runs that diverge."""
        return wilson(len(self.diverged), self.ended)

    def until(self, seeds: int) -> Arm:
        """The arm as it was after its first seeds."""
        scores = tuple(row for row in self.scores if row[0] < seeds)
        lost, failed, stalled = (
            tuple([k for k in own if k < seeds]) for own in (self.diverged, self.failed, self.stalled)
        )
        if len(scores) + len(lost) + len(failed) == self.ended + len(self.failed):
            return self
        correct = None if self.correct is None else self.correct[: len(scores)]
        return Arm(self.name, scores, lost, failed, stalled, self.settings, correct, self.tuning)

    def is_complete(self, seeds: int) -> bool:
        """Whether each of its first seeds has ended, in whatever way."""
        ended = sum(seed < seeds for seed, _ in self.scores)
        return ended + sum(seed < seeds for seed in (*self.diverged, *self.failed)) >= seeds


def difference_of(
    a: Arm, b: Arm, metric: Metric, pairs: bool, least: Mapping[str, float]
) -> Difference | None:
    """The tested difference; None with fewer than three seeds in an arm, or without any spread over them.

    Where the bits of the images are known it is that on new images: the better model, not the better score on these.
    """
    x, y = samples(a, b, pairs)
    if min(len(x), len(y)) < MIN_SEEDS:
        return None
    further, gap = a.tuning + b.tuning, 0.0
    if has_bits(a, b, metric) and a.correct is not None and b.correct is not None:
        ours, theirs = _rows(a, b, pairs)
        images, gap = image_variance(a.correct[ours], b.correct[theirs], pairs)
        further += images
    elif pairs and metric.images:
        gap = (100 / metric.images) ** 2 / 6
    found = paired(x, y, gap, further) if pairs else welch(x, y, (least[a.name], least[b.name]), further)
    return found if found.error else None


def has_bits(a: Arm, b: Arm, metric: Metric) -> bool:
    """Whether both runs have a bit for each of the same images, so that the difference on new images is known."""
    x, y = a.correct, b.correct
    return metric.name == "top1" and x is not None and y is not None and x.shape[1] == y.shape[1]


def _rows(a: Arm, b: Arm, pairs: bool) -> tuple[list[int], list[int]]:
    """The places of the scores of both arms that count: all, or those of the seeds that both have, in one order."""
    ours, theirs = [seed for seed, _ in a.scores], [seed for seed, _ in b.scores]
    both = [seed for seed in ours if seed in theirs]
    if not pairs:
        return list(range(len(ours))), list(range(len(theirs)))
    return [ours.index(seed) for seed in both], [theirs.index(seed) for seed in both]


def samples(a: Arm, b: Arm, pairs: bool) -> tuple[Sequence[float], Sequence[float]]:
    """The scores of both arms, of the seeds that both have where they are paired."""
    x, y = _rows(a, b, pairs)
    return [a.values[row] for row in x], [b.values[row] for row in y]


def least_of(arms: Mapping[str, Arm], metric: Metric) -> dict[str, float]:
    """The variance over seeds that each arm has at least, by name."""
    scores = {name: arm.values for name, arm in arms.items()}
    bits = {name: arm.correct for name, arm in arms.items()}
    return least_variances(scores, bits, metric.images, metric.name == "top1")
