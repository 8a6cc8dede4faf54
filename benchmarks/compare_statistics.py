"""Simulate the statistics of a comparison on planted truths: coverage, false positives, power, equivalence, divergence.

    python benchmarks/compare_statistics.py --trials 20000 --output results/compare_statistics.json

Every trial draws the scores of seeds from known normal distributions and asks `fathoms.compare.verdicts.judge`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from fathoms.compare.arms import Arm, Metric
from fathoms.compare.statistics import ALPHA, detectable, divergence_p, is_stalled, power_of, welch
from fathoms.compare.verdicts import Rules, judge

TOP1 = Metric("top1", "points", 1, 10.0)


def draw(rng: np.random.Generator, name: str, mean: float, sd: float, seeds: int) -> Arm:
    """One arm with scores of `seeds` runs."""
    return Arm(name, tuple(enumerate(rng.normal(mean, sd, seeds).tolist())))


def coverage(trials: int, seeds: int, ratio: float, rng: np.random.Generator) -> float:
    """Share of 95 % intervals of a difference that hold the true one; one arm `ratio` times as noisy."""
    hits = 0
    for _ in range(trials):
        low, high = welch(rng.normal(1.0, 1.0, seeds), rng.normal(0.0, ratio, seeds)).interval(0.05)
        hits += low <= 1.0 <= high
    return hits / trials


def false_positives(trials: int, arms: int, seeds: int, ratio: float, rng: np.random.Generator) -> float:
    """Share of comparisons of equal arms in which at least one pair is called different; one arm noisier."""
    rules, wrong = Rules(TOP1, margin=0.01, floor=1.0), 0
    for _ in range(trials):
        drawn = [draw(rng, str(k), 90.0, ratio if k == 0 else 1.0, seeds) for k in range(arms)]
        wrong += any(verdict.verdict in ("a better", "b better") for verdict in judge(drawn, rules))
    return wrong / trials


def found(trials: int, difference: float, seeds: int, rng: np.random.Generator) -> float:
    """Share of comparisons of two arms that call a true difference, in standard deviations, by its right sign."""
    rules, right = Rules(TOP1, margin=0.01, floor=1.0), 0
    for _ in range(trials):
        pair = [draw(rng, "a", 90.0 + difference, 1.0, seeds), draw(rng, "b", 90.0, 1.0, seeds)]
        right += judge(pair, rules)[0].verdict == "a better"
    return right / trials


def called_equivalent(
    trials: int, difference: float, margin: float, seeds: int, rng: np.random.Generator
) -> float:
    """Share of comparisons that call two arms equivalent within `margin`, at a true difference."""
    rules, said = Rules(TOP1, margin=margin, floor=1.0), 0
    for _ in range(trials):
        pair = [draw(rng, "a", 90.0 + difference, 1.0, seeds), draw(rng, "b", 90.0, 1.0, seeds)]
        said += judge(pair, rules)[0].verdict == "equivalent"
    return said / trials


def falsely_more_divergent(trials: int, share: float, seeds: int, rng: np.random.Generator) -> float:
    """Share of pairs of arms that diverge equally often of which Fisher's test says that they do not."""
    counts = rng.binomial(seeds, share, (trials, 2))
    ps = [divergence_p((int(a), seeds), (int(b), seeds)) for a, b in counts]
    return sum(p is not None and p < ALPHA for p in ps) / trials


def unnamed_divergence(trials: int, rng: np.random.Generator) -> float:
    """Share of comparisons with a better arm that diverges in two of five runs, whose sentence does not say so."""
    rules, silent = Rules(TOP1, margin=0.01, floor=1.0), 0
    for _ in range(trials):
        risky = Arm("risky", tuple(enumerate(rng.normal(95.0, 1.0, 3).tolist())), diverged=2)
        verdict = judge([risky, draw(rng, "safe", 90.0, 1.0, 5)], rules)[0]
        silent += "risky 2 of 5" not in verdict.sentence
        silent += verdict.verdict == "a better" and "2 of its 5 runs diverged" not in verdict.sentence
    return silent / trials


def called_stalled(trials: int, chance: float, rng: np.random.Generator, images: int = 10_000) -> float:
    """Share of runs that get an image right with this chance which count as stalled, of ten classes."""
    scores = 100 * rng.binomial(images, chance, trials) / images
    return sum(is_stalled(float(score), 10, images) for score in scores) / trials


Row = dict[str, float | list[float] | bool]


def row(seen: float, theory: float, low: float, high: float) -> Row:
    """A row of the table: seen, by theory, and whether it lies where it must."""
    return {"seen": seen, "theory": round(theory, 4), "must_lie": [low, high], "holds": low <= seen <= high}


def simulate(trials: int, seed: int = 0) -> dict[str, Row]:
    """Every planted case, by name."""
    rng = np.random.default_rng(seed)
    # Three standard errors of a share near one half.
    slack = 1.5 / trials**0.5
    rows: dict[str, Row] = {}
    for seeds in (3, 5, 10):
        for ratio in (1.0, 3.0):
            name = f"coverage, {seeds} seeds, deviations 1 : {ratio:g}"
            rows[name] = row(coverage(trials, seeds, ratio, rng), 0.95, 0.93, 0.97)
    for ratio in (1.0, 3.0):
        name = f"family-wise false positives, 8 equal arms, one {ratio:g} times as noisy"
        rows[name] = row(false_positives(max(trials // 5, 1), 8, 5, ratio, rng), 0.05, 0.0, 0.05)
    for seeds in (3, 5, 10):
        difference = detectable(1.0, seeds)
        theory = power_of(difference, 1.0, seeds)
        name = f"power, {seeds} seeds, difference {difference:.2f} sd"
        rows[name] = row(found(trials, difference, seeds, rng), theory, theory - slack, theory + slack)
    name = "called equivalent within 2 sd, 10 seeds, true difference {} sd"
    rows[name.format(2)] = row(called_equivalent(trials, 2.0, 2.0, 10, rng), 0.05, 0.0, 0.05)
    rows[name.format(0)] = row(called_equivalent(trials, 0.0, 2.0, 10, rng), 1.0, 0.9, 1.0)
    for share in (0.1, 0.5):
        name = f"Fisher's test of arms that diverge equally often, {share:.0%}, 10 seeds, says they do not"
        rows[name] = row(falsely_more_divergent(trials, share, 10, rng), 0.05, 0.0, 0.05)
    name = "a better arm with 2 of 5 runs diverged, not said"
    rows[name] = row(unnamed_divergence(max(trials // 10, 1), rng), 0.0, 0.0, 0.0)
    rows["a guess called stalled"] = row(called_stalled(trials, 0.1, rng), 0.9545, 0.93, 0.97)
    rows["a run two points above a guess called stalled"] = row(
        called_stalled(trials, 0.12, rng), 0.0, 0.0, 0.01
    )
    return rows


def main() -> int:
    """Simulate, print a table and keep the numbers; 1 if one of them lies where it must not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    rows = simulate(args.trials, args.seed)
    for name, found_ in rows.items():
        mark = "" if found_["holds"] else "  WRONG"
        print(f"{name:<88} {found_['seen']:.4f}  (theory {found_['theory']:.3f}){mark}")
    kept = {
        "command": f"python benchmarks/compare_statistics.py --trials {args.trials} --seed {args.seed}",
        "trials": args.trials,
        "seed": args.seed,
        "seconds": round(time.monotonic() - began),
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept))
    return 0 if all(found_["holds"] for found_ in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
