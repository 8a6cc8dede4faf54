"""Tests and intervals over seeds: Welch, Holm, equivalence, power, divergence counts.

A seed is one sample. With a handful of seeds only Student's t has its nominal coverage (a bootstrap over five seeds
covers 83 % where it says 95 %), so every interval of a mean is a t interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fathoms.compare.spread import MIN_SEEDS

Scores = Sequence[float] | np.ndarray

ALPHA = 0.05
"""Family-wise error of all verdicts of a comparison."""
POWER = 0.8
"""Chance of seeing a true difference that is promised as visible."""
SHARES = 64
"""Points at which the power of Welch's test is averaged over the ratio of the two sample variances."""


@dataclass(frozen=True)
class Difference:
    """The difference of two means, mean(a) - mean(b), with its standard error.

    Args:
        value: In the unit of the scores.
        error: Its standard error; 0 where all scores of both arms are equal.
        df: Degrees of freedom, Welch's or those of the pairs.
        n: Seeds of the smaller arm.
        correlation: Between arms over seeds; NaN where they are not paired by seed, and if it is not defined.
    """

    value: float
    error: float
    df: float
    n: int
    correlation: float = math.nan

    @property
    def p(self) -> float:
        """Two-sided p of no difference."""
        if self.error == 0.0:
            return 1.0 if self.value == 0.0 else 0.0
        return float(2 * stats.t.sf(abs(self.value) / self.error, self.df))

    def interval(self, alpha: float) -> tuple[float, float]:
        """The two-sided interval of level 1 - alpha."""
        half = self.error * float(stats.t.isf(alpha / 2, self.df)) if self.error else 0.0
        return self.value - half, self.value + half

    def equivalent(self, margin: float, alpha: float) -> bool:
        """Two one-sided tests: whether the difference is smaller than `margin` in both directions."""
        low, high = self.interval(2 * alpha)
        return -margin < low and high < margin


def welch(a: Scores, b: Scores, least: float = 0.0) -> Difference:
    """Two arms of independent seeds with variances of their own; none is below `least`, that of rounded scores.

    >>> round(welch([90.1, 90.3, 90.2], [89.1, 89.4, 89.0]).p, 4)
    0.0052
    """
    x, y = np.asarray(a, float), np.asarray(b, float)
    parts = np.array([max(float(one.var(ddof=1)), least) / len(one) for one in (x, y)])
    total = float(parts.sum())
    df = total**2 / float((parts**2 / np.array([len(x) - 1, len(y) - 1])).sum()) if total else math.inf
    return Difference(float(x.mean() - y.mean()), math.sqrt(total), df, min(len(x), len(y)))


def paired(a: Scores, b: Scores, least: float = 0.0) -> Difference:
    """Two arms whose runs of a seed start from the same weights, so that what they share cancels.

    The variance of a gap is at least that of two rounded scores.
    """
    x, y = np.asarray(a, float), np.asarray(b, float)
    gaps = x - y
    error = math.sqrt(max(float(gaps.var(ddof=1)), 2 * least) / len(gaps))
    return Difference(float(gaps.mean()), error, float(len(gaps) - 1), len(gaps), correlation(x, y))


def correlation(a: Scores, b: Scores) -> float:
    """Pearson's correlation over the seeds; NaN with other counts or without spread."""
    x, y = np.asarray(a, float), np.asarray(b, float)
    if len(x) != len(y) or len(x) < 3 or not x.std() or not y.std():
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def holm_levels(ps: Sequence[float], alpha: float = ALPHA) -> list[tuple[float, bool]]:
    """For each hypothesis the level at which Holm's procedure tests it, and whether it is rejected.

    Holm tests the i-th smallest p at alpha / (m - i + 1) and stops at the first that is not below it; that level then
    belongs to all later ones. An interval of level 1 - this alpha leaves zero out exactly where Holm rejects.

    >>> holm_levels([0.001, 0.04, 0.03])
    [(0.016666666666666666, True), (0.025, False), (0.025, False)]
    """
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    levels: list[tuple[float, bool]] = [(alpha, False)] * len(ps)
    stopped: float | None = None
    for rank, index in enumerate(order):
        level = stopped if stopped is not None else alpha / (len(ps) - rank)
        rejected = stopped is None and ps[index] < level
        if not rejected:
            stopped = level
        levels[index] = (level, rejected)
    return levels


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p: sorted, multiplied by the hypotheses left, never falling."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        largest = max(largest, min(1.0, ps[index] * (len(ps) - rank)))
        adjusted[index] = largest
    return adjusted


def noise_floor(error: float, images: int) -> float:
    """Expected standard deviation of accuracy over seeds, sqrt(error / (2 images)), both as shares.

    Paper: Jordan 2023, arXiv:2304.01910.
    """
    return math.sqrt(max(error, 0.0) / (2 * images))


def power_of(difference: float, sd: float, seeds: int, alpha: float = ALPHA) -> float:
    """Chance that Welch's test of two arms of equal spread finds this difference.

    Given how the two sample variances share their sum, t is non-central with 2 (seeds - 1) degrees of freedom, while
    the test takes its limit from fewer: with three seeds a fixed 2 (seeds - 1) would promise 80 % where 69 % are found.
    """
    df, shift = 2 * (seeds - 1), abs(difference) / (sd * math.sqrt(2 / seeds))
    share = stats.beta.ppf((np.arange(SHARES) + 0.5) / SHARES, (seeds - 1) / 2, (seeds - 1) / 2)
    limit = stats.t.isf(alpha / 2, (seeds - 1) / (share**2 + (1 - share) ** 2))
    return float((stats.nct.sf(limit, df, shift) + stats.nct.cdf(-limit, df, shift)).mean())


def detectable(sd: float, seeds: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """The smallest difference that these seeds show with this power."""
    if sd == 0.0:
        return 0.0
    low, high = 0.0, sd
    while power_of(high, sd, seeds, alpha) < power:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power_of(middle, sd, seeds, alpha) < power else (low, middle)
    return high


def seeds_for(difference: float, sd: float, alpha: float = ALPHA, most: int = 1000) -> int | None:
    """Seeds of each arm that show this difference; None if more than `most` are needed."""
    if sd == 0.0:
        return MIN_SEEDS
    # The normal distribution says where to look; t needs a few seeds more.
    reach = 2 * ((stats.norm.isf(alpha / 2) + stats.norm.ppf(POWER)) * sd / difference) ** 2
    if reach > most:
        return None
    seeds = max(2, math.floor(reach))
    while power_of(difference, sd, seeds, alpha) < POWER:
        seeds += 1
    return max(seeds, MIN_SEEDS) if seeds <= most else None


def pooled_sd(arms: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation over seeds within arms, and its degrees of freedom."""
    squares = sum(float(np.var(arm, ddof=0)) * len(arm) for arm in arms if len(arm) > 1)
    df = sum(len(arm) - 1 for arm in arms if len(arm) > 1)
    return (math.sqrt(squares / df) if df else math.nan), df


def win_share(a: Scores, b: Scores, pairs: bool = False) -> float:
    """P(A > B): the share of pairs of runs in which A is above B; ties count half.

    Args:
        a: The scores of one arm.
        b: Those of the other.
        pairs: Whether only runs of the same place are a pair, which share a seed.
    """
    x, y = np.asarray(a, float), np.asarray(b, float)
    x, y = (x, y) if pairs else (x[:, None], y[None, :])
    return float(((x > y) + 0.5 * (x == y)).mean())


def wilson(count: int, total: int, alpha: float = ALPHA) -> tuple[float, float]:
    """Wilson's interval of a share.

    >>> tuple(round(side, 3) for side in wilson(1, 5))
    (0.036, 0.624)
    """
    if total == 0:
        return 0.0, 1.0
    low, high = stats.binomtest(count, total).proportion_ci(1 - alpha, method="wilson")
    return float(low), float(high)


def divergence_p(a: tuple[int, int], b: tuple[int, int]) -> float | None:
    """Fisher's exact p that two arms diverge equally often, each (diverged, runs); None if no count could show it."""
    (x, n), (y, m) = a, b
    extreme = stats.fisher_exact([[0, n], [m, 0]]).pvalue
    if extreme >= ALPHA:
        return None
    return float(stats.fisher_exact([[x, n - x], [y, m - y]]).pvalue)


def is_stalled(top1: float, classes: int, images: int) -> bool:
    """Whether an accuracy in percent is within two standard errors of guessing."""
    chance = 1 / classes
    return abs(top1 / 100 - chance) <= 2 * math.sqrt(chance * (1 - chance) / images)


def on_new_images(a: np.ndarray, b: np.ndarray, pairs: bool = False) -> Difference:
    """The accuracy difference, in points, with its standard error on new images and new seeds.

    From the bits (seeds, images) of both arms. The spread over seeds holds for this held-out set; new images add the
    spread of the per-image difference over images, less what of it is noise of the seeds.

    Args:
        a: Whether each image was classified correctly, a row a seed.
        b: The same of the other arm.
        pairs: Whether row k of both arms started from the same weights.
    """
    samples = [a.astype(float) - b.astype(float)] if pairs else [a.astype(float), b.astype(float)]
    images = a.shape[1]
    parts = [(x.mean(1).var(ddof=1) / len(x), len(x) - 1) for x in samples]
    within = sum(float((x.var(0, ddof=1) / len(x)).mean()) for x in samples)
    gaps = a.mean(0) - b.mean(0)
    parts.append((max(0.0, float(gaps.var(ddof=1)) - within) / images, images - 1))
    total = float(sum(part for part, _ in parts))
    df = total**2 / float(sum(part**2 / own for part, own in parts)) if total else math.inf
    return Difference(100 * float(gaps.mean()), 100 * math.sqrt(total), df, min(len(a), len(b)))
