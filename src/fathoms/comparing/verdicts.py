"""Verdicts of a comparison: from the scores of each arm, look by look, to sentences that the statistics support."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import special

from fathoms.comparing.arms import Arm, Metric, difference_of, has_bits, least_of, samples
from fathoms.comparing.looks import POWER, holm_at, level_at, seeds_for
from fathoms.comparing.plan import counterparts, pairs_of
from fathoms.comparing.statistics import (
    ALPHA,
    MIN_SEEDS,
    Difference,
    divergence_p,
    holm,
    pooled_sd,
    sd_range,
    win_share,
)
from fathoms.text_table import plural

WIN_SHARE_SEEDS = 5
"""P(A > B) of fewer seeds says nothing."""
BETTER = ("a better", "b better")
NO_DIFFERENCE, UNDECIDED, DROPPED = "no difference", "undecided", "dropped"
DIVERGES = ("a diverges more often", "b diverges more often")
NO_SPREAD = "no spread"
"""The verdict on scores that are equal over the seeds, which no test can weigh."""
TOO_FEW = "too few seeds"
DECIDED = (*BETTER, NO_DIFFERENCE, *DIVERGES)
"""Verdicts that further seeds are not asked about."""


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
    test: str = "none"
    level: float = math.nan
    """What the p of this pair alone had to be below."""
    correlation: float = math.nan
    win_share: float | None = None
    new_images: bool = False
    """Whether the interval holds for new images as well as new seeds."""
    more: int | None = None
    """Further seeds of each arm that would show what matters, at most; None where none would, or none is asked for."""

    def to_json(self) -> dict[str, Any]:
        """As results.json keeps it; a number that is not defined is null."""
        unknown = {key for key, v in vars(self).items() if isinstance(v, float) and not math.isfinite(v)}
        return {key: None if key in unknown else value for key, value in vars(self).items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Verdict:
        """The verdict that `to_json` wrote; a number that was not defined is NaN."""
        known = {each.name: each.type for each in dataclasses.fields(cls) if each.name in row}
        values: dict[str, Any] = {
            name: math.nan if row[name] is None and kind == "float" else row[name]
            for name, kind in known.items()
        }
        return cls(**values)


def winner(arms: Sequence[str], verdicts: Iterable[Verdict]) -> str | None:
    """The arm that is better than every other; None where none is."""
    wins = [v.a if v.verdict == BETTER[0] else v.b for v in verdicts if v.verdict in BETTER]
    return next((name for name in arms if len(arms) > 1 and wins.count(name) == len(arms) - 1), None)


@dataclass(frozen=True)
class Rules:
    """How arms are compared; fixed before the first run.

    Args:
        metric: The score.
        margin: Differences below it do not matter to the user; equivalence is tested against it.
        baseline: The arm, or the value of an axis, that is compared with; None compares all pairs.
        paired: Whether the runs of a seed start from the same weights in every arm.
        looks: Seeds at each planned look; with fewer than two there is one test of all that has ended.
        keep: Arms that go on, and after how many seeds; None drops none.
        exploratory: Whether the plan followed the scores, so that 5 % is not kept.
    """

    metric: Metric
    margin: float
    baseline: str | None = None
    paired: bool = False
    looks: tuple[int, ...] = ()
    keep: tuple[int, int] | None = None
    exploratory: bool = False


@dataclass(frozen=True)
class _Pair:
    """Two arms at one look: what is measured, and the level it is tested at; without a difference there is no test."""

    a: Arm
    b: Arm
    difference: Difference | None
    level: float
    rejected: bool
    p: float
    diverging: float | None
    equivalence: float


def judge(arms: Iterable[Arm], rules: Rules) -> list[Verdict]:
    """The verdict of every pair, corrected over all pairs of the plan and over all looks.

    A pair that one look has decided keeps the verdict of that look.
    """
    made = list(_after_looks(arms, rules)[-1].values())
    if not rules.exploratory:
        return made
    return [dataclasses.replace(verdict, sentence=f"exploratory: {verdict.sentence}") for verdict in made]


def _after_looks(arms: Iterable[Arm], rules: Rules) -> list[dict[tuple[str, str], Verdict]]:
    """The verdict of every pair as it was after each look."""
    known = {arm.name: arm for arm in arms}
    pairs = pairs_of({arm.name: arm.settings for arm in known.values()}, rules.baseline)
    looks = rules.looks if len(rules.looks) > 1 else (0,)
    decided: dict[tuple[str, str], Verdict] = {}
    found: dict[tuple[str, str], Verdict] = {}
    after: list[dict[tuple[str, str], Verdict]] = []
    for look, seeds in enumerate(looks):
        gone = dropped(known.values(), rules, seeds)
        open_ = [pair for pair in pairs if pair not in decided]
        at = {name: arm.until(seeds) for name, arm in known.items()} if seeds else known
        complete = {name for name, arm in at.items() if arm.is_complete(seeds)}
        # A pair that is not complete yet belongs to the look before.
        ready = [pair for pair in open_ if complete.issuperset(pair)]
        rejected = sum(verdict.verdict in BETTER for verdict in decided.values())
        ready = [pair for pair in ready if not gone & set(pair)]
        family = (len(pairs), len(pairs) - rejected)
        # A look that nothing is ready for has nothing to say of pairs that an earlier one spoke of.
        for verdict in _look(at, open_, ready, rules, look, family) if ready or not look else ():
            pair = (verdict.a, verdict.b)
            if pair in ready and verdict.verdict in DECIDED and seeds:
                decided[pair] = verdict
            if pair in ready or pair not in found:
                found[pair] = verdict
        for pair in (pair for pair in open_ if gone & set(pair)):
            found[pair] = _unjudged(known[pair[0]], known[pair[1]], gone)
        after.append({pair: found[pair] for pair in pairs})
    return after


def dropped(arms: Iterable[Arm], rules: Rules, seeds: int = 0) -> set[str]:
    """Arms that are given up after some seeds: all but the best and the baseline, once all of them got there."""
    known = {arm.name: arm for arm in arms}
    if rules.keep is None or 0 < seeds <= rules.keep[1]:
        return set()
    count, at = rules.keep
    if not all(arm.is_complete(at) for arm in known.values()):
        return set()
    settings = {arm.name: arm.settings for arm in known.values()}
    others = list(counterparts(settings, rules.baseline)) if rules.baseline is not None else list(known)
    chance = rules.metric.chance
    means = {name: known[name].until(at).mean_with_diverged(chance) for name in others}
    # A run that failed says nothing of its arm: it ranks last.
    ranked = sorted(
        others, key=lambda name: -math.inf if math.isnan(means[name]) else rules.metric.sign * means[name]
    )
    return set(ranked[: max(0, len(others) - count)])


def wanted_seeds(arms: Sequence[Arm], rules: Rules, seeds: int) -> dict[str, int]:
    """Seeds that each arm is to have by now: those of the next look, and only where it is open what it says."""
    stops = sorted({*(look for look in rules.looks if look < seeds), seeds})
    if rules.keep is not None:
        stops = sorted({*stops, rules.keep[1]})
    wanted = {arm.name: stops[0] for arm in arms}
    pairs = pairs_of({arm.name: arm.settings for arm in arms}, rules.baseline)
    after = _after_looks(arms, rules) if len(rules.looks) > 1 else []
    for stop, further in itertools.pairwise(stops):
        if not all(arm.is_complete(stop) for arm in arms if wanted[arm.name] >= stop):
            break
        now = [arm.until(stop) for arm in arms]
        gone = dropped(now, rules, stop + 1)
        looked = sum(look <= stop for look in rules.looks) if after else 0
        closed = {pair for pair, v in after[looked - 1].items() if v.verdict in DECIDED} if looked else set()
        open_ = {name for pair in pairs if pair not in closed and not gone & set(pair) for name in pair}
        for name in wanted:
            if name in open_ and name not in gone and wanted[name] == stop:
                wanted[name] = further
    return wanted


def _look(
    at: Mapping[str, Arm],
    pairs: Sequence[tuple[str, str]],
    ready: Collection[tuple[str, str]],
    rules: Rules,
    look: int,
    family: tuple[int, int],
) -> list[Verdict]:
    """The verdicts of one look at these pairs; those that are not ready have no test, and still count.

    `family` has the pairs of the plan, and those that no look has rejected yet.
    """
    metric, (total, left) = rules.metric, family
    least = least_of(at, metric)
    found = {pair: difference_of(at[pair[0]], at[pair[1]], metric, rules.paired, least) for pair in ready}
    differences = {pair: value for pair, value in found.items() if value is not None}
    # The family is the plan's pairs, so that an interval does not widen as further runs end.
    ps = [differences[pair].p if pair in differences else 1.0 for pair in pairs]
    ps += [1.0] * (left - len(pairs))
    levels, rejected = (found.tolist() for found in holm_at(ps, rules.looks, look, left))
    adjusted = holm(ps)
    ready_arms = {name: at[name] for pair in ready for name in pair}
    diverging = _divergences(ready_arms, [pair for pair in pairs if pair in ready])
    equivalence = level_at(rules.looks, look, 2 * ALPHA / max(1, total)) / 2
    several = len(rules.looks) > 1
    return [
        _verdict(
            _Pair(
                at[pair[0]],
                at[pair[1]],
                differences.get(pair),
                levels[index],
                rejected[index],
                ps[index] if several else adjusted[index],
                diverging.get(pair),
                equivalence,
            ),
            rules,
            total,
        )
        for index, pair in enumerate(pairs)
    ]


def _divergences(arms: Mapping[str, Arm], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Fisher's p that two arms diverge equally often, corrected by Holm over all pairs whose counts could show it."""
    found: dict[tuple[str, str], float] = {}
    for pair in pairs:
        a, b = (arms[name] for name in pair)
        if a.diverged or b.diverged:
            p = divergence_p((len(a.diverged), a.ended), (len(b.diverged), b.ended))
            if p is not None:
                found[pair] = p
    # Pairs without a diverged run are in the family too.
    ps = [*found.values(), *[1.0] * (len(pairs) - len(found))]
    return dict(zip(found, holm(ps), strict=False))


def _unjudged(a: Arm, b: Arm, gone: Collection[str]) -> Verdict:
    names = [arm.name for arm in (a, b) if arm.name in gone]
    were = "was" if len(names) == 1 else "were"
    said = f"{a.name} and {b.name}: no verdict, since {' and '.join(names)} {were} dropped early"
    n = min(len(a.scores), len(b.scores))
    return Verdict(a.name, b.name, math.nan, math.nan, math.nan, math.nan, n, DROPPED, said)


def _untested(a: Arm, b: Arm, rules: Rules, diverging: float | None) -> Verdict:
    """Two arms of too few seeds, or without spread over them."""
    x, y = samples(a, b, rules.paired)
    n, word = min(len(x), len(y)), TOO_FEW
    gap = sum(x) / len(x) - sum(y) / len(y) if n else math.nan
    lost = [arm for arm in (a, b) if arm.lost]
    if lost:
        gone = " and ".join(
            f"{arm.name} {rules.metric.lost} in {len(arm.diverged)} of {arm.ended}" for arm in lost
        )
        said = f"{a.name} and {b.name}: no verdict on the score, since {gone}"
    elif n >= MIN_SEEDS:
        word = NO_SPREAD
        said = f"{a.name} and {b.name}: no verdict, since there is no spread over {n} seeds"
    else:
        said = (
            f"{a.name} and {b.name}: no verdict from {plural(n, 'finished seed')}; {MIN_SEEDS} are the least"
        )
    more, clause = _divergence(a, b, diverging, rules.metric)
    if not lost or diverging is not None:
        said += clause
    return Verdict(a.name, b.name, gap, math.nan, math.nan, math.nan, n, more or word, said)


def _verdict(pair: _Pair, rules: Rules, total: int) -> Verdict:
    a, b, difference, metric = pair.a, pair.b, pair.difference, rules.metric
    if difference is None:
        return _untested(a, b, rules, pair.diverging)
    low, high = difference.interval(pair.level)
    size, wanted = abs(difference.value), None
    more, clause = _divergence(a, b, pair.diverging, metric)
    if pair.rejected:
        winner, loser = (a, b) if metric.sign * difference.value > 0 else (b, a)
        word = BETTER[winner is b]
        sides = sorted((abs(low), abs(high)))
        said = f"{winner.name} is better than {loser.name} by {metric.amount(size)}"
        said += f" ({metric.amount(sides[0])} to {metric.amount(sides[1])})"
        if size < rules.margin:
            said += f", less than the {metric.amount(rules.margin)} that matter"
        if winner.diverged:
            said += f"; but {len(winner.diverged)} of its {winner.ended} runs {metric.lost}"
    elif difference.within(rules.margin, pair.equivalence):
        word = NO_DIFFERENCE
        said = f"{a.name} and {b.name}: no difference above {metric.amount(rules.margin)}"
    else:
        word = more or UNDECIDED
        told, wanted = _more_seeds(a, b, difference, rules, total)
        said = f"{a.name} and {b.name}: undecided; {told}"
    if rules.paired and math.isfinite(difference.correlation):
        said += f"; paired by seed, correlation {difference.correlation:.2f}"
    said += clause
    share = win_share(*samples(a, b, rules.paired), rules.paired) if difference.n >= WIN_SHARE_SEEDS else None
    if share is not None and metric.sign < 0:
        share = 1 - share
    test = ("paired t" if rules.paired else "Welch") + ", Holm"
    test += f", look at {difference.n} seeds" if len(rules.looks) > 1 else ""
    numbers = (difference.value, low, high, pair.p, int(difference.n), word, said, test, pair.level)
    known = {"new_images": has_bits(a, b, metric), "more": wanted}
    return Verdict(a.name, b.name, *numbers, difference.correlation, share, **known)


@functools.lru_cache(maxsize=4096)
def _needed(sds: int, alpha: float, pairs: bool) -> int | None:
    """Seeds that show a difference of so many hundredths of a deviation."""
    return seeds_for(sds / 100, 1.0, alpha, pairs=pairs) if sds else None


def _more_seeds(a: Arm, b: Arm, difference: Difference, rules: Rules, total: int) -> tuple[str, int | None]:
    """How many further seeds would show what matters, from the spread of these two arms and what is known of it.

    What the images and the luck of tuning leave open is the same for any number of seeds.
    """
    wanted, n, alpha = rules.metric.amount(rules.margin), difference.n, ALPHA / max(1, total)
    reach = float(special.ndtri(1 - alpha / 2) + special.ndtri(POWER)) * math.sqrt(difference.further)
    if reach >= rules.margin:
        return f"no number of seeds would show {wanted}, since the tuning or the images leave more open", None
    margin = math.sqrt(rules.margin**2 - reach**2)
    x, y = samples(a, b, rules.paired)
    if rules.paired:
        gaps = [i - j for i, j in zip(x, y, strict=True)]
        sd, df = pooled_sd([gaps])
    else:
        sd, df = pooled_sd([x, y])
    # Never less than the test itself works with.
    sd = max(sd, difference.error * math.sqrt(n / (1 if rules.paired else 2)))
    sides = [
        _needed(round(100 * margin / own), alpha, rules.paired) if margin < 30 * own else n
        for own in sd_range(sd, df)
    ]
    few, many = sides
    if few is None:
        return f"more than 1,000 seeds would be needed to show {wanted}", None
    if many is not None and many <= n:
        return f"{n} seeds show {wanted} four times in five, so the difference is likely smaller", 0
    if many is None:
        return f"{max(1, few - n)} more seeds or over 1,000 would show {wanted}", None
    low, high = max(1, few - n), many - n
    seeds = plural(high, "more seed") if low == high else f"{low} to {high} more seeds"
    return f"{seeds} would show {wanted}", high


def _divergence(a: Arm, b: Arm, p: float | None, metric: Metric) -> tuple[str, str]:
    """The verdict on how often the two diverge where it differs, and a clause; empty where neither did."""
    if not a.diverged and not b.diverged:
        return "", ""
    x, y = len(a.diverged), len(b.diverged)
    counts = f"{metric.lost}: {a.name} {x} of {a.ended}, {b.name} {y} of {b.ended}"
    if p is None:
        return "", f"; {counts} (too few seeds to compare)"
    if p >= ALPHA:
        return "", f"; {counts} (not told apart, p = {p:.2g}, Fisher, Holm)"
    often = x / a.ended > y / b.ended
    said = f"; {(a if often else b).name} {metric.loses} more often ({counts}; p = {p:.2g}, Fisher, Holm)"
    return DIVERGES[not often], said
