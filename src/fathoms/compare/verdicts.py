"""Verdicts of a comparison: from the scores of each arm to sentences that the statistics support."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fathoms.compare.arms import Arm, Metric, lost_arms
from fathoms.compare.pairs import pairs_of
from fathoms.compare.statistics import (
    ALPHA,
    MIN_SEEDS,
    Difference,
    divergence_p,
    holm,
    holm_levels,
    on_new_images,
    paired,
    pooled_sd,
    seeds_for,
    welch,
    win_share,
)
from fathoms.text_table import plural

WIN_SHARE_SEEDS = 5
"""P(A > B) of fewer seeds says nothing."""
NO_SPREAD = "no spread"
"""The verdict on scores that are equal over the seeds, which no test can weigh."""
POOLED_DF = 8
"""With fewer degrees of freedom the pooled deviation is too rough to plan seeds with."""


@dataclass(frozen=True)
class Verdict:
    """One pair of arms: the difference a - b, its corrected interval and what may be said of it."""

    a: str
    b: str
    difference: float
    low: float
    high: float
    p: float
    n: int
    verdict: str
    sentence: str
    test: str
    correlation: float
    win_share: float | None
    new_images: tuple[float, float] | None = None
    """The interval, of the same level, for new images as well as new seeds; accuracy only."""

    def to_json(self) -> dict[str, Any]:
        """As results.json keeps it; a number that is not defined is null."""
        return {key: _plain(value) for key, value in vars(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(side) for side in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Rules:
    """How arms are compared; fixed before the first run.

    Args:
        metric: The score.
        margin: Differences below it do not matter to the user; equivalence is tested against it.
        floor: Standard deviation over seeds that the held-out set's size alone lets expect.
        baseline: The arm, or the value of an axis, that is compared with; None compares all pairs.
        paired: Whether the runs of a seed start from the same weights in every arm.
    """

    metric: Metric
    margin: float
    floor: float
    baseline: str | None = None
    paired: bool = False


@dataclass(frozen=True)
class Tested:
    """A difference among those of a comparison: the level it is tested at, and what came of it.

    Args:
        difference: The difference a - b.
        level: Holm's alpha for this pair; its interval has level 1 - alpha.
        rejected: Whether there is a difference.
        p: Holm's adjusted p.
        diverging: Holm's adjusted p that the two diverge equally often; None if no count could show it.
        pairs: Pairs that are tested together.
        needed: Seeds that would show the smallest difference of interest; None if too many.
    """

    difference: Difference
    level: float
    rejected: bool
    p: float
    diverging: float | None
    pairs: int
    needed: int | None


def judge(arms: Iterable[Arm], rules: Rules) -> list[Verdict]:
    """The verdict of every pair, corrected by Holm over all pairs that can be tested."""
    known = {arm.name: arm for arm in arms}
    pairs = pairs_of({arm.name: arm.settings for arm in known.values()}, rules.baseline)
    found = {pair: _difference(known[pair[0]], known[pair[1]], rules) for pair in pairs}
    differences = {pair: value for pair, value in found.items() if value is not None}
    ps = [value.p for value in differences.values()]
    corrected = dict(zip(differences, zip(holm_levels(ps), holm(ps), strict=True), strict=True))
    diverging = _divergences(known, pairs)
    needed = None
    if differences:
        needed = seeds_for(rules.margin, _planning_sd(known.values(), rules), ALPHA / len(pairs))
    made: list[Verdict] = []
    for pair in pairs:
        a, b = known[pair[0]], known[pair[1]]
        if pair not in differences:
            made.append(_untested(a, b, rules, diverging.get(pair)))
            continue
        ours = (*corrected[pair][0], corrected[pair][1], diverging.get(pair))
        tested = Tested(differences[pair], *ours, len(pairs), needed)
        made.append(_verdict(a, b, tested, rules))
    return made


def _difference(a: Arm, b: Arm, rules: Rules) -> Difference | None:
    """The tested difference; None with fewer than three seeds in an arm, or without any spread over them."""
    x, y = _samples(a, b, rules)
    if min(len(x), len(y)) < MIN_SEEDS or _is_flat(x, y, rules):
        return None
    least = rules.metric.rounding
    return paired(x, y, least) if rules.paired else welch(x, y, least)


def _samples(a: Arm, b: Arm, rules: Rules) -> tuple[list[float], list[float]]:
    """The scores of both arms, of the seeds that both have where they are paired."""
    if not rules.paired:
        return a.values, b.values
    ours, theirs = dict(a.scores), dict(b.scores)
    both = [seed for seed in ours if seed in theirs]
    return [ours[seed] for seed in both], [theirs[seed] for seed in both]


def _is_flat(x: Sequence[float], y: Sequence[float], rules: Rules) -> bool:
    """Whether nothing varies over seeds, not even by rounding: equal scores would show any difference."""
    samples = [[i - j for i, j in zip(x, y, strict=True)]] if rules.paired else [x, y]
    return not rules.metric.rounding and all(max(one) == min(one) for one in samples)


def _divergences(arms: Mapping[str, Arm], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Fisher's p that two arms diverge equally often, corrected by Holm over all pairs whose counts could show it."""
    found: dict[tuple[str, str], float] = {}
    for pair in pairs:
        a, b = (arms[name] for name in pair)
        p = divergence_p((a.diverged, a.ended), (b.diverged, b.ended))
        if p is not None:
            found[pair] = p
    return dict(zip(found, holm(list(found.values())), strict=True))


def _planning_sd(arms: Iterable[Arm], rules: Rules) -> float:
    """The deviation that the number of further seeds is reckoned with: pooled over arms, or the noise floor."""
    sd, df = pooled_sd([arm.values for arm in arms])
    return sd if df >= POOLED_DF or not rules.floor else rules.floor


def _untested(a: Arm, b: Arm, rules: Rules, diverging: float | None) -> Verdict:
    """Two arms of too few seeds, or without spread over them."""
    x, y = _samples(a, b, rules)
    n, word = min(len(x), len(y)), "too few seeds"
    gap = sum(x) / len(x) - sum(y) / len(y) if n else math.nan
    if lost := lost_arms([a, b]):
        said = f"{a.name} and {b.name}: no verdict on the score, since {lost}"
    elif n >= MIN_SEEDS:
        word = NO_SPREAD
        said = f"{a.name} and {b.name}: no verdict, since there is no spread over {n} seeds"
    else:
        said = (
            f"{a.name} and {b.name}: no verdict from {plural(n, 'finished seed')}; {MIN_SEEDS} are the least"
        )
    if not lost or diverging is not None:
        said += _divergence(a, b, diverging)
    nan = math.nan
    return Verdict(a.name, b.name, gap, nan, nan, nan, n, word, said, "none", nan, None)


def _verdict(a: Arm, b: Arm, tested: Tested, rules: Rules) -> Verdict:
    difference = tested.difference
    low, high = difference.interval(tested.level)
    metric, size = rules.metric, abs(difference.value)
    if tested.rejected:
        winner, loser = (a, b) if metric.sign * difference.value > 0 else (b, a)
        word = "a better" if winner is a else "b better"
        said = f"{winner.name} is better than {loser.name} by {_amount(size, metric)}"
        said += (
            f" ({_amount(min(abs(low), abs(high)), metric)} to {_amount(max(abs(low), abs(high)), metric)})"
        )
        if winner.diverged:
            said += f"; but {winner.diverged} of its {winner.ended} runs diverged"
    elif difference.equivalent(rules.margin, ALPHA / tested.pairs):
        word = "equivalent"
        said = f"{a.name} and {b.name}: no difference above {_amount(rules.margin, metric)}"
    else:
        word = "not separated"
        said = f"{a.name} and {b.name} are not separated; {_more_seeds(difference.n, tested.needed, rules)}"
    if rules.paired and math.isfinite(difference.correlation):
        said += f"; paired by seed, correlation {difference.correlation:.2f}"
    said += _divergence(a, b, tested.diverging)
    share = win_share(*_samples(a, b, rules), rules.paired) if difference.n >= WIN_SHARE_SEEDS else None
    if share is not None and metric.sign < 0:
        share = 1 - share
    test = "paired t, Holm" if rules.paired else "Welch, Holm"
    numbers = (difference.value, low, high, tested.p, difference.n)
    further = _on_new_images(a, b, tested, rules)
    return Verdict(a.name, b.name, *numbers, word, said, test, difference.correlation, share, further)


def _on_new_images(a: Arm, b: Arm, tested: Tested, rules: Rules) -> tuple[float, float] | None:
    """The interval of the accuracy difference on new images; None where the images' bits are not known.

    Many images bring many degrees of freedom, which may outweigh the variance that they add: the interval is never
    narrower than that of the same images.
    """
    x, y = a.correct, b.correct
    if rules.metric.name != "top1" or x is None or y is None or x.shape[1] != y.shape[1]:
        return None
    if rules.paired:
        ours, theirs = [seed for seed, _ in a.scores], [seed for seed, _ in b.scores]
        both = [seed for seed in ours if seed in theirs]
        x, y = x[[ours.index(seed) for seed in both]], y[[theirs.index(seed) for seed in both]]
    same, new = (d.interval(tested.level) for d in (tested.difference, on_new_images(x, y, rules.paired)))
    return min(same[0], new[0]), max(same[1], new[1])


def _more_seeds(n: int, needed: int | None, rules: Rules) -> str:
    wanted = _amount(rules.margin, rules.metric)
    if needed is None:
        return f"more than 1,000 seeds would be needed to show {wanted}"
    if needed <= n:
        return f"{n} seeds show {wanted} four times in five, so the difference is likely smaller"
    return f"about {needed} seeds would show {wanted}"


def _divergence(a: Arm, b: Arm, p: float | None) -> str:
    """A clause on how often the two diverge; empty where neither did."""
    if not a.diverged and not b.diverged:
        return ""
    counts = f"diverged: {a.name} {a.diverged} of {a.ended}, {b.name} {b.diverged} of {b.ended}"
    if p is None:
        return f"; {counts} (too few seeds to compare)"
    return f"; {counts} ({'differs' if p < ALPHA else 'not separated'}, p = {p:.2g}, Fisher, Holm)"


def _amount(value: float, metric: Metric) -> str:
    return f"{value:.{metric.digits}f} {metric.unit}".strip()
