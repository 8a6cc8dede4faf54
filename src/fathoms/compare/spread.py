"""Spread of scores over seeds: their standard deviation, and Student's interval of their mean.

Imports neither numpy nor scipy.stats, which take a second: the page of a comparison needs no more than this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIN_SEEDS = 3
"""With fewer there is no interval and no verdict."""


def sd_over_seeds(scores: Sequence[float]) -> float | None:
    """The standard deviation of some seeds; None with fewer than two."""
    if len(scores) < 2:
        return None
    mean = sum(scores) / len(scores)
    return math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))


def rounding_variance(images: int) -> float:
    """The variance of an accuracy in percent that comes from the number of images alone.

    It is known to 100 / images; seeds whose scores are equal may differ by less.
    """
    return (100 / images) ** 2 / 12


def mean_interval(
    scores: Sequence[float], alpha: float = 0.05, least: float = 0.0
) -> tuple[float, float] | None:
    """Student's interval of the mean of some seeds; None with fewer than three.

    Args:
        scores: A score for each seed.
        alpha: One minus the level.
        least: Smallest variance over seeds, where scores are rounded.

    >>> tuple(round(side, 3) for side in mean_interval([90.1, 90.3, 90.2]))
    (89.952, 90.448)
    """
    from scipy.special import stdtrit

    n, sd = len(scores), sd_over_seeds(scores)
    if sd is None or n < MIN_SEEDS:
        return None
    half = max(sd, math.sqrt(least)) / math.sqrt(n) * float(stdtrit(n - 1, 1 - alpha / 2))
    mean = sum(scores) / n
    return mean - half, mean + half
