"""Many drawn comparisons at once: their trials, scores, looks and verdicts, as arrays of comparisons by arms.

The arithmetic is the project's own: `welch_of`, `Difference`, `holm_at`, `level_at`, `divergence_p`, `next_value`,
`parabola_top`. What goes on from look to look is repeated here for arrays, since `judge` takes a millisecond; of every
design some comparisons are given to `judge` and `wanted_seeds` too, and must come out the same (`check`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fathoms.comparing.arms import Arm, Metric
from fathoms.comparing.looks import holm_at, level_at
from fathoms.comparing.statistics import ALPHA, MIN_SEEDS, QUIET, Difference, divergence_p, welch_of
from fathoms.comparing.tuning import LOWERED, WINDOW, Top, next_value, parabola_top, rounded, top_of
from fathoms.comparing.verdicts import BETTER, DIVERGES, DROPPED, NO_DIFFERENCE, Rules, judge, wanted_seeds

SCORE = Metric("top1", "points", 1, 10.0)
"""An accuracy whose images are not known, so that no floor but that of the other arms helps."""
GRID = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
WIDE = (1.25e-4, 2.5e-4, *GRID, 1.6e-2, 3.2e-2)
"""The grid with what may be tried beyond its edges."""
CURVES: dict[str, Callable[[float], float]] = {
    # Accuracy lost by octaves from the best rate; nan diverges.
    "parabola": lambda d: d * d,
    "steep on the right": lambda d: (0.5 if d < 0 else 2.0) * d * d,
    "plateau": lambda d: max(0.0, abs(d) - 0.7) ** 2,
    "diverges an octave above the best": lambda d: math.nan if d > 1.0 else d * d,
    "grows until it diverges": lambda d: math.nan if d > 0.2 else -d,
}
BEST_OF = "best of single trials"
CHECKED = 50
"""Comparisons of each design that are judged by the project itself as well."""
OPEN, ABOVE, BELOW, SAME, MORE = range(5)
"""What is known of a pair: nothing, the arm is better, the baseline is, no difference, one diverges more often."""


@dataclass(frozen=True)
class Design:
    """One kind of comparison.

    Args:
        seeds: Of each arm, or the planned looks.
        pairs: Arms that are compared with the baseline.
        spreads: Deviations over seeds of baseline and arms; None for equal ones.
        fewer: Seeds of every arm but the baseline, where they have fewer.
        keep: Arms that go on, and after how many seeds.
        grown: Whether looks are taken one after the other without a plan, each with the whole error.
        curve: How accuracy falls with the rate, where each arm is tuned; None without tuning.
        rule: How a rate is chosen.
        noise: Of a trial's score on val beside that of its seed, in deviations over seeds.
        diverging: Chance of each run to diverge.
        gain: What the first arm has above the others.
        margin: Smallest difference that matters.
    """

    seeds: tuple[int, ...]
    pairs: int = 1
    spreads: tuple[float, ...] | None = None
    fewer: int = 0
    keep: tuple[int, int] | None = None
    grown: bool = False
    curve: str | None = None
    rule: str = "parabola"
    noise: float = 1.0
    diverging: float = 0.0
    gain: float = 0.0
    margin: float = 0.01

    @property
    def deviations(self) -> np.ndarray:
        """Of baseline and arms over seeds."""
        return np.array(self.spreads or (1.0,) * (self.pairs + 1))

    def rules(self) -> Rules:
        """The rules that its verdicts follow."""
        looks = self.seeds if len(self.seeds) > 1 else ()
        return Rules(SCORE, self.margin, "base", looks=looks, keep=self.keep)


@dataclass(frozen=True)
class Drawn:
    """Comparisons: scores by arm and seed, nan where a run diverged, and what tuning cost each arm."""

    scores: np.ndarray
    variance: np.ndarray
    trials: np.ndarray

    def arms(self, place: int, most: np.ndarray) -> list[Arm]:
        """One comparison as the project has it, each arm with its first seeds."""
        found = []
        for arm, scores in enumerate(self.scores[place]):
            own = list(enumerate(scores[: most[arm]].tolist()))
            name = f"arm{arm}" if arm else "base"
            done = tuple(row for row in own if not math.isnan(row[1]))
            lost = tuple(seed for seed, score in own if math.isnan(score))
            settings = {"arm": name}
            found.append(Arm(name, done, lost, settings=settings, tuning=float(self.variance[place, arm])))
        return found


def draw(design: Design, trials: int, rng: np.random.Generator) -> Drawn:
    """The scores of all seeds of some comparisons."""
    shape = (trials, design.pairs + 1)
    lost, variance, tried = np.zeros(shape), np.zeros(shape), np.zeros(shape, int)
    if design.curve:
        lost, variance, tried = tuned(design, trials, rng)
    mean = 90.0 - lost
    mean[:, 1] += design.gain
    noise = rng.normal(size=(*shape, design.seeds[-1])) * design.deviations[:, None]
    scores = np.where(rng.random(noise.shape) < design.diverging, math.nan, mean[..., None] + noise)
    return Drawn(scores, variance, tried)


def tuned(design: Design, trials: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """What the chosen rate costs each arm, the variance that its test is told of, and its trials."""
    curve, arms = CURVES[design.curve or "parabola"], design.pairs + 1
    best = math.log2(2e-3) + rng.uniform(-1, 1, trials)
    # `Tuning.noise` takes two floors of val, as wide as seeds were seen to spread.
    noise = design.deviations * math.hypot(1.0, design.noise)
    own = np.array([[curve(math.log2(rate) - at) for rate in WIDE] for at in best])
    scores = 50.0 - own[:, None] + rng.normal(size=(trials, arms, len(WIDE))) * noise[:, None]
    scores = scores.reshape(-1, len(WIDE))
    chosen, variance, tried = _choose(scores, np.tile(noise, trials), design.rule)
    octaves = np.log2(chosen) - np.repeat(best, arms)
    lost = np.array([curve(place) for place in octaves.tolist()])
    for place in np.flatnonzero(np.isnan(lost)):
        # Whole runs diverge there.
        rate, trained = chosen[place], _trained(scores[place], tried[place])
        for _ in range(LOWERED):
            lower = [other for other in trained if other < rate]
            if math.isnan(lost[place]) and lower:
                rate = max(lower)
                lost[place] = curve(math.log2(rate) - best[place // arms])
    counts = np.array([len(GRID) if own is None else len(own) for own in tried])
    return tuple(found.reshape(trials, arms) for found in (np.nan_to_num(lost, nan=10.0), variance, counts))


def _trained(scores: np.ndarray, tried: list[float] | None) -> dict[float, float]:
    """The scores of an arm's trials that did not diverge; of those of the grid where nothing else is known."""
    own = dict(zip(WIDE, scores.tolist(), strict=True))
    return {rate: own[rate] for rate in tried or GRID if not math.isnan(own[rate])}


def _choose(scores: np.ndarray, noise: np.ndarray, rule: str) -> tuple[Any, ...]:
    """The rate of each arm, the variance of what it loses, and what was tried; None where that is the grid."""
    tried: list[list[float] | None] = [None] * len(scores)
    chosen, variance = np.zeros(len(scores)), np.zeros(len(scores))
    grid = scores[:, WIDE.index(GRID[0]) :][:, : len(GRID)]
    best = np.argmax(np.nan_to_num(grid, nan=-math.inf), axis=1)
    inside = ~np.isnan(grid).any(1) & (best > 0) & (best < len(GRID) - 1)
    groups: dict[tuple[float, ...], list[int]] = {}
    if rule == BEST_OF:
        return np.array(GRID)[best], variance, tried
    # Where the whole grid trained and its best is no edge, nothing else is tried; the steps are one octave.
    for middle in range(1, len(GRID) - 1):
        near = tuple(rate for place, rate in enumerate(GRID) if abs(place - middle) <= WINDOW)
        groups[near] = np.flatnonzero(inside & (best == middle)).tolist()
    for place in np.flatnonzero(~inside):
        own = dict(zip(WIDE, scores[place].tolist(), strict=True))
        seen = {rate: None if math.isnan(own[rate]) else own[rate] for rate in GRID}
        while (further := next_value(seen, GRID)) is not None:
            seen[further] = None if math.isnan(own[further]) else own[further]
        tried[place] = [*seen]
        trained = _trained(scores[place], tried[place])
        at = math.log2(max(trained, key=trained.__getitem__))
        near = tuple(sorted(rate for rate in trained if abs(math.log2(rate) - at) <= WINDOW))
        groups.setdefault(near, []).append(place)
    for near, places in groups.items():
        if len(near) < 3:
            for place in places:
                top = _top(scores[place], tried[place], noise[place])
                chosen[place], variance[place] = top.value, top.variance
        elif places:
            columns = [WIDE.index(rate) for rate in near]
            values, _, _, variance[places] = parabola_top(
                np.log2(near), scores[places][:, columns].T, noise[places]
            )
            chosen[places] = [rounded(value) for value in values.tolist()]
    for place in range(0, len(scores), max(1, len(scores) // CHECKED)):
        top = _top(scores[place], tried[place], noise[place])
        assert next_value(_points(scores[place], tried[place]), GRID) is None
        assert (chosen[place], round(variance[place], 9)) == (top.value, round(top.variance, 9))
    return chosen, variance, tried


def _points(scores: np.ndarray, tried: list[float] | None) -> dict[float, float | None]:
    """What the project is told of an arm's trials."""
    trained = _trained(scores, tried)
    return {rate: trained.get(rate) for rate in tried or GRID}


def _top(scores: np.ndarray, tried: list[float] | None, noise: float) -> Top:
    top = top_of(_points(scores, tried), noise)
    assert top is not None
    return top


@dataclass
class Verdicts:
    """Of each comparison and pair what is known, its interval, and whether it was dropped; seeds of each arm."""

    known: np.ndarray
    low: np.ndarray
    high: np.ndarray
    gone: np.ndarray
    seeds: np.ndarray


def judged(design: Design, drawn: Drawn) -> Verdicts:
    """The verdict of every pair, look by look."""
    looks = design.seeds if len(design.seeds) > 1 else ()
    trials, arms = drawn.scores.shape[:2]
    pairs = arms - 1
    found = Verdicts(
        np.zeros((trials, pairs), int),
        *(np.full((trials, pairs), math.nan) for _ in range(2)),
        np.zeros((trials, pairs), bool),
        np.zeros((trials, arms), int),
    )
    for look, seeds in enumerate(design.seeds if looks else design.seeds[-1:]):
        if design.keep is not None and (not looks or seeds > design.keep[1]) and not found.gone.any():
            found.gone = _dropped(design, drawn) & (found.known == OPEN)
            found.seeds = np.maximum(found.seeds, design.keep[1])
        open_ = (found.known == OPEN) & ~found.gone
        found.seeds[:, 1:][open_] = design.fewer or seeds
        found.seeds[:, 0] = np.where(open_.any(1), seeds, found.seeds[:, 0])
        here = np.where(np.arange(drawn.scores.shape[2]) < found.seeds[..., None], drawn.scores, math.nan)
        difference, enough, lost = _differences(here, drawn.variance)
        p = np.where(open_ & enough, difference.p, 1.0)
        rejected_before = (found.known == ABOVE) | (found.known == BELOW)
        levels, rejected = holm_at(np.where(rejected_before, 2.0, p), looks, look, (~rejected_before).sum(1))
        rejected &= open_ & enough
        half = difference.half(levels)
        same = difference.within(design.margin, level_at(looks, look, 2 * ALPHA / pairs) / 2)
        more = _more(lost, open_, found.seeds)
        now = np.select(
            [rejected & (difference.value > 0), rejected, enough & same, more],
            [ABOVE, BELOW, SAME, MORE],
            OPEN,
        )
        found.known[open_] = now[open_]
        shown = open_ & enough
        found.low[shown], found.high[shown] = (
            (difference.value - half)[shown],
            (difference.value + half)[shown],
        )
        found.low[open_ & ~enough] = math.nan
    found.low[found.gone] = math.nan
    return found


def _differences(scores: np.ndarray, variance: np.ndarray) -> tuple[Difference, np.ndarray, np.ndarray]:
    """Each arm against the baseline; whether both have seeds enough; runs of every arm that diverged among all."""
    counts = (~np.isnan(scores)).sum(2)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.nansum(scores, 2) / counts
        spreads = np.nansum((scores - means[..., None]) ** 2, 2) / (counts - 1)
        known = np.ma.masked_array(spreads, counts < 2)
        least = QUIET * np.ma.median(known, axis=1).filled(0.0)[:, None]
        spreads = np.where(counts > 1, spreads, 0.0)
        parts = [(own[:, 1:], own[:, :1]) for own in (means, spreads, counts)]
        difference = welch_of(*parts, (least, least), variance[:, 1:] + variance[:, :1])
    enough = np.minimum(*parts[2]) >= MIN_SEEDS
    # Numbers that are not used must not stop the others.
    safe = [np.where(enough, own, 1.0) for own in (difference.value, difference.error, difference.df)]
    return replace(difference, value=safe[0], error=safe[1], df=safe[2]), enough, counts


def _dropped(design: Design, drawn: Drawn) -> np.ndarray:
    """Which arms are given up: all but the best, diverged runs at the score of a guess."""
    assert design.keep is not None
    count, at = design.keep
    means = np.nan_to_num(drawn.scores[:, 1:, :at], nan=SCORE.chance).mean(2)
    rank = np.argsort(np.argsort(means, axis=1), axis=1)
    return rank < means.shape[1] - count


@functools.lru_cache(maxsize=1024)
def _fisher(x: int, n: int, y: int, m: int) -> float:
    p = divergence_p((int(x), int(n)), (int(y), int(m)))
    return math.nan if p is None else p


def _more(counts: np.ndarray, open_: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Whether one of a pair diverges more often: Fisher's test, Holm over the open pairs."""
    lost = seeds - counts
    more = np.zeros_like(open_)
    for place in np.flatnonzero((lost.any(1)) & open_.any(1)):
        x, n = lost[place], seeds[place]
        own = {
            k: _fisher(x[k + 1], n[k + 1], x[0], n[0])
            for k in np.flatnonzero(open_[place])
            if x[k + 1] or x[0]
        }
        ps = sorted((p, k) for k, p in own.items() if not math.isnan(p))
        adjusted = 0.0
        for rank, (p, k) in enumerate(ps):
            adjusted = max(adjusted, p * (open_[place].sum() - rank))
            more[place, k] = adjusted < ALPHA
    return more


def check(design: Design, drawn: Drawn, found: Verdicts) -> None:
    """Judge some comparisons by the project itself: the same words, intervals and seeds, or an error."""
    words = {OPEN: None, ABOVE: BETTER[0], BELOW: BETTER[1], SAME: NO_DIFFERENCE, MORE: DIVERGES}
    rules, most = design.rules(), design.seeds[-1]
    for place in range(0, len(drawn.scores), max(1, len(drawn.scores) // CHECKED)):
        arms = drawn.arms(place, found.seeds[place])
        if not design.fewer:
            # As a comparison does it: what is wanted is run, and then asked again.
            wanted, now = np.zeros(len(arms), int), np.ones(len(arms), int)
            while wanted.tolist() != now.tolist():
                wanted, now = now, np.array([*wanted_seeds(drawn.arms(place, now), rules, most).values()])
            assert wanted.tolist() == found.seeds[place].tolist(), (design, wanted, found.seeds[place])
        for pair, verdict in enumerate(judge(arms, rules)):
            word = words[int(found.known[place, pair])]
            if found.gone[place, pair]:
                word = DROPPED
            same = verdict.verdict in BETTER + DIVERGES + (NO_DIFFERENCE, DROPPED)
            assert (
                verdict.verdict in word
                if isinstance(word, tuple)
                else (word == verdict.verdict if same else not word)
            )
            sides = [(verdict.low, found.low[place, pair]), (verdict.high, found.high[place, pair])]
            if not found.gone[place, pair] and math.isfinite(verdict.low):
                assert all(math.isclose(own, other, abs_tol=1e-7) for own, other in sides), (
                    design,
                    verdict,
                    sides,
                )


def simulate(design: Design, trials: int, rng: np.random.Generator) -> dict[str, float]:
    """One row of the table: error, coverage of each interval and of all of a comparison, power and runs."""
    parts = [min(5000, trials - begun) for begun in range(0, trials, 5000)]
    counts = sum(np.array(_counts(design, part, rng)) for part in parts)
    wrong, found, intervals, covered, whole, runs = counts.tolist()
    shown = {
        "error": wrong / trials,
        "coverage": covered / max(1, intervals),
        "coverage_of_all": whole / trials,
    }
    if design.gain:
        shown["power"] = found / trials
    fixed = design.seeds[-1] * (design.pairs + 1)
    return {**shown, "runs": runs / trials, "runs_of_fixed": runs / trials / fixed}


def _counts(design: Design, trials: int, rng: np.random.Generator) -> tuple[float, ...]:
    drawn = draw(design, trials, rng)
    own, wrong, right = design, np.zeros(trials, bool), np.zeros(trials, bool)
    # Looks without a plan are comparisons of their own, one after the other.
    for seeds in [(look,) for look in design.seeds] if design.grown else [design.seeds]:
        own = replace(design, seeds=seeds, grown=False)
        cut = replace(drawn, scores=drawn.scores[..., : seeds[-1]])
        found = judged(own, cut)
        check(own, cut, found)
        true = np.zeros_like(found.gone)
        if design.gain:
            true[:, 0] = found.known[:, 0] == ABOVE
        wrong |= (np.isin(found.known, (ABOVE, BELOW)) & ~true).any(1)
        right |= true[:, 0]
    truth = np.zeros(design.pairs)
    truth[0] = design.gain
    printed = np.isfinite(found.low)
    covered = printed & (found.low <= truth) & (truth <= found.high)
    runs = drawn.trials.sum() + found.seeds.sum()
    return wrong.sum(), right.sum(), printed.sum(), covered.sum(), (covered == printed).all(1).sum(), runs
