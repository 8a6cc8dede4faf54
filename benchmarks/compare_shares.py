"""Single shares of simulated comparisons: promised power, no difference, divergence, new images, stalled runs.

`python benchmarks/compare_statistics.py` runs them beside its designs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from compare_batches import MORE, SAME, SCORE, Design, check, draw, judged
from fathoms.comparing.arms import Arm
from fathoms.comparing.looks import detectable
from fathoms.comparing.statistics import ALPHA, divergence_p, is_stalled, welch_of
from fathoms.comparing.verdicts import BETTER, Rules, judge


def promised(trials: int, rng: np.random.Generator) -> Iterator[tuple[str, float]]:
    """The power at the smallest difference that is promised four times in five."""
    for seeds in range(3, 11):
        for pairs in (1, 2, 3, 5, 10, 15, 28, 45):
            shift = detectable(1.0, seeds, ALPHA / pairs)
            a, b = rng.normal(shift, 1, (trials, seeds)), rng.normal(0, 1, (trials, seeds))
            moments = [(x.mean(1), x.var(1, ddof=1)) for x in (a, b)]
            seen = np.mean(welch_of(*zip(*moments, strict=True), (seeds, seeds)).p < ALPHA / pairs)
            kind = "1 pair" if pairs == 1 else f"{pairs} pairs"
            yield f"promised difference found, {seeds} seeds, {kind} ({shift:.2f} sd)", float(seen)


def called_equivalent(trials: int, difference: float, rng: np.random.Generator) -> float:
    """Share of comparisons of ten seeds that say `no difference` above two deviations, at a true difference."""
    design = Design((10,), margin=2.0, gain=difference)
    return float((judged(design, draw(design, trials, rng)).known == SAME).mean())


def falsely_more_divergent(trials: int, share: float, seeds: int, rng: np.random.Generator) -> float:
    """Share of pairs of arms that diverge equally often of which Fisher's test says that they do not."""
    counts = rng.binomial(seeds, share, (trials, 2))
    ps = [divergence_p((int(a), seeds), (int(b), seeds)) for a, b in counts]
    return sum(p is not None and p < ALPHA for p in ps) / trials


def more_divergent(trials: int, rng: np.random.Generator) -> float:
    """Share of comparisons of arms that diverge in 5 % and in 70 % of ten runs that say so."""
    design = Design((10,), 1)
    drawn = draw(design, trials, rng)
    gone = rng.random(drawn.scores.shape) < np.array([0.05, 0.7])[:, None]
    drawn = dataclasses.replace(drawn, scores=np.where(gone, math.nan, drawn.scores))
    found = judged(design, drawn)
    check(design, drawn, found)
    return float((found.known == MORE).mean())


def on_new_images(
    trials: int, seeds: int, taste: float, rng: np.random.Generator, images: int = 360
) -> float:
    """Share of comparisons of arms that are equal over all images, not on each, that call one better."""
    wrong = 0
    for _ in range(trials):
        chance = rng.uniform(0.2, 1.0, images)
        arms = []
        for name in ("base", "arm1"):
            own = np.clip(chance + taste * rng.normal(0, 1, images), 0, 1)
            bits = (rng.uniform(size=(seeds, images)) < own).astype(np.uint8)
            scores = tuple(enumerate((100 * bits.mean(1)).tolist()))
            arms.append(Arm(name, scores, settings={"arm": name}, correct=bits))
        rules = Rules(dataclasses.replace(SCORE, images=images), 0.01, "base")
        wrong += judge(arms, rules)[0].verdict in BETTER
    return wrong / trials


def called_stalled(trials: int, chance: float, rng: np.random.Generator, images: int = 10_000) -> float:
    """Share of runs that get an image right with this chance which count as stalled, of ten classes."""
    scores = 100 * rng.binomial(images, chance, trials) / images
    return sum(is_stalled(float(score), 0.1, images) for score in scores) / trials


def rates(trials: int, rng: np.random.Generator) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Single shares with the bounds they must lie in."""
    slack = 2 * math.sqrt(0.8 * 0.2 / trials)
    for name, seen in promised(trials, rng):
        yield name, seen, (0.8 - 0.01 - slack, 0.8 + 0.01 + slack)
    name = "called `no difference` above 2 sd, 10 seeds, true difference {} sd"
    yield name.format(2), called_equivalent(trials, 2.0, rng), (0.0, ALPHA)
    yield name.format(0), called_equivalent(trials, 0.0, rng), (0.9, 1.0)
    for share in (0.1, 0.5):
        name = f"arms that diverge equally often, {share:.0%} of 10 runs, told apart"
        yield name, falsely_more_divergent(trials, share, 10, rng), (0.0, ALPHA)
    yield (
        "arms that diverge in 5 % and 70 % of 10 runs, told apart",
        more_divergent(trials, rng),
        (0.6, 1.0),
    )
    for seeds in (3, 5, 10):
        for taste in (0.0, 0.15, 0.24):
            name = f"new images, {seeds} seeds, per-image difference {taste:g}, equal arms told apart"
            yield name, on_new_images(trials // 5, seeds, taste, rng), (0.0, ALPHA)
    yield "a guess called stalled", called_stalled(trials, 0.1, rng), (0.96, 0.99)
    yield "a run two points above a guess called stalled", called_stalled(trials, 0.12, rng), (0.0, 0.01)
