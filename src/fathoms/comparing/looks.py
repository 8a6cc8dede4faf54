"""Planned looks: how the error of a comparison is shared among numbers of seeds before the first run, and its power.

A test that is looked at after 3, 5 and 10 seeds calls equal arms different in 10 %, since each look is a chance. Here
each pair spends its error as O'Brien and Fleming do, little at first and nearly all at the end, so the last look is
almost as sharp as a test without looks (Lan and DeMets, Biometrika 1983).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special

from fathoms.comparing.statistics import ALPHA, CAUTION, MIN_SEEDS
from fathoms.errors import ConfigError

GRID = 1201
"""Points of the density that the limits are found from; odd, for Simpson's rule."""

POWER = 0.8
"""Chance of seeing a true difference that is promised as visible."""
SHARES = 64
"""Points at which the power of Welch's test is averaged over the ratio of the two sample variances."""


@functools.lru_cache(maxsize=4096)
def nominal_levels(looks: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """The level at which each look is tested so that all of them together have `alpha`.

    The recursion of Armitage, McPherson and Rowe (1969): the density of the sum of increments that crossed no limit so
    far, look by look.

    Args:
        looks: Seeds at each look.
        alpha: Error of a pair over all looks.

    >>> [round(level, 4) for level in nominal_levels((5, 10), 0.05)]
    [0.0031, 0.049]
    """
    times = [look / looks[-1] for look in looks]
    edge = float(special.ndtri(1 - alpha / 4))
    spent = [min(alpha, 4 * float(special.ndtr(-edge / math.sqrt(time)))) for time in times]
    levels, limit = [spent[0]], -float(special.ndtri(spent[0] / 2)) * math.sqrt(times[0])
    points = np.linspace(-limit, limit, GRID)
    density = np.exp(-(points**2) / (2 * times[0])) / math.sqrt(2 * math.pi * times[0])
    for before, now, share in zip(times, times[1:], np.diff(spent), strict=False):
        step = math.sqrt(now - before)
        weights = _simpson(points) * density
        low, high = 0.0, 12.0
        for _ in range(50):
            middle = (low + high) / 2
            edge = middle * math.sqrt(now)
            beyond = special.ndtr((points - edge) / step) + special.ndtr((-points - edge) / step)
            low, high = (middle, high) if float(weights @ beyond) > share else (low, middle)
        levels.append(2 * float(special.ndtr(-high)))
        limit = high * math.sqrt(now)
        further = np.linspace(-limit, limit, GRID)
        moved = np.exp(-((further[:, None] - points) ** 2) / (2 * step**2)) / (step * math.sqrt(2 * math.pi))
        points, density = further, moved @ weights
    return tuple(levels)


def _simpson(points: np.ndarray) -> np.ndarray:
    weights = np.full(len(points), 2.0)
    weights[1::2], weights[0], weights[-1] = 4.0, 1.0, 1.0
    return weights * (points[1] - points[0]) / 3


def level_at(looks: Sequence[int], look: int, alpha: float = ALPHA) -> float:
    """The level of one look; without planned looks the only test has all of it."""
    return nominal_levels(tuple(looks), alpha)[look] if len(looks) > 1 else alpha


def holm_at(ps: Any, looks: Sequence[int], look: int, left: Any) -> tuple[np.ndarray, np.ndarray]:
    """Holm's step-down at one look over the hypotheses that are left: the level of each, and whether it is rejected.

    Bartroff and Lai (arXiv:1107.1919): hypotheses that an earlier look rejected are out of the family, all others are
    in it, also those that were given up. It keeps the family-wise error over all looks.

    Args:
        ps: Of each hypothesis; further axes in front are further comparisons.
        looks: See `nominal_levels`.
        look: The place of this one.
        left: Hypotheses that are left of each comparison.
    """
    ps, left = np.asarray(ps, float), np.asarray(left)
    order, places = np.argsort(ps, axis=-1, kind="stable"), np.arange(ps.shape[-1])
    by_count = [level_at(looks, look, ALPHA / max(1, count)) for count in range(int(left.max()) + 1)]
    levels = np.asarray(by_count)[np.maximum(0, left[..., None] - places)]
    below = np.logical_and.accumulate(np.take_along_axis(ps, order, -1) < levels, axis=-1)
    # The level of the first that is not rejected belongs to all after it.
    stop = np.minimum(places, below.sum(-1, keepdims=True))
    back = np.argsort(order, axis=-1)
    reached = np.take_along_axis(levels, stop, -1)
    return np.take_along_axis(reached, back, -1), np.take_along_axis(below, back, -1)


def _need(true: bool, what: str) -> None:
    """Refuse arguments that no answer belongs to, NaN among them: a comparison with it is false."""
    if not true:
        raise ConfigError(f"power: needs {what}")


def power_of(difference: float, sd: float, seeds: int, alpha: float = ALPHA, pairs: bool = False) -> float:
    """Chance that the test of two arms of equal spread finds this difference.

    Given how the two sample variances share their sum, t is non-central with 2 (seeds - 1) degrees of freedom, while
    the test takes its limit from fewer: with three seeds a fixed 2 (seeds - 1) would promise 80 % where 66 % are found.

    Args:
        difference: The true one.
        sd: Deviation over seeds of an arm; of the gaps where they are paired.
        seeds: Of each arm.
        alpha: Level of the test.
        pairs: Whether runs are paired by seed.
    """
    _need(sd > 0 and seeds >= 2 and 0 < alpha < 1, "a deviation above 0, 2 seeds or more and a level below 1")
    df, shift = 2 * (seeds - 1), abs(difference) / (sd * math.sqrt(2 / seeds))
    if pairs:
        df, shift = seeds - 1, abs(difference) / sd * math.sqrt(seeds)
        own = np.array([float(df)])
    else:
        share = special.betaincinv((seeds - 1) / 2, (seeds - 1) / 2, (np.arange(SHARES) + 0.5) / SHARES)
        own = (seeds - 1) / (share**2 + (1 - share) ** 2)
        own -= CAUTION / (seeds - 1) * (own - (seeds - 1))
    limit = -special.stdtrit(own, alpha / 2)
    # The other tail is below 1e-6 wherever the series of it fails, with a high limit far from the shift.
    other = np.nan_to_num(special.nctdtr(df, shift, -limit))
    return float((1 - special.nctdtr(df, shift, limit) + other).mean())


def detectable(
    sd: float, seeds: int, alpha: float = ALPHA, power: float = POWER, pairs: bool = False
) -> float:
    """The smallest difference that these seeds show with this power."""
    if sd == 0.0:
        return 0.0
    _need(0 < power < 1, "a power between 0 and 1")
    low, high = 0.0, sd
    while power_of(high, sd, seeds, alpha, pairs) < power:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power_of(middle, sd, seeds, alpha, pairs) < power else (low, middle)
    return high


def seeds_for(
    difference: float, sd: float, alpha: float = ALPHA, most: int = 1000, pairs: bool = False
) -> int | None:
    """Seeds of each arm that show this difference; None if more than `most` are needed."""
    if sd == 0.0:
        return MIN_SEEDS
    _need(difference > 0 < sd, "a difference and a deviation above 0")
    # The normal distribution says where to look; t needs a few seeds more.
    reach = (special.ndtri(1 - alpha / 2) + special.ndtri(POWER)) * sd / difference
    reach = reach**2 if pairs else 2 * reach**2
    if reach > most:
        return None
    seeds = max(2, math.floor(reach))
    while power_of(difference, sd, seeds, alpha, pairs) < POWER:
        seeds += 1
    return max(seeds, MIN_SEEDS) if seeds <= most else None


def smallest_shown(sd: float, looks: Sequence[int], pairs: int, paired: bool = False) -> float:
    """The difference that a design shows four times in five at its last look; `sd` is that of an arm over seeds."""
    level = level_at(looks, len(looks) - 1, ALPHA / max(1, pairs))
    return detectable(sd * math.sqrt(2) if paired else sd, looks[-1], level, pairs=paired)
