"""Simulate the statistics of a comparison: coverage, false positives, power, equivalence, on planted truths.

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

from fathoms.compare.statistics import detectable, power_of, welch
from fathoms.compare.verdicts import Arm, Metric, Rules, judge

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


def simulate(trials: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Every planted case, by name."""
    rng = np.random.default_rng(seed)
    rows: dict[str, dict[str, float]] = {}
    for seeds in (3, 5, 10):
        for ratio in (1.0, 3.0):
            name = f"coverage, {seeds} seeds, deviations 1 : {ratio:g}"
            rows[name] = {"seen": coverage(trials, seeds, ratio, rng), "nominal": 0.95}
    for ratio in (1.0, 3.0):
        seen = false_positives(max(trials // 10, 1), 8, 5, ratio, rng)
        rows[f"family-wise false positives, 8 equal arms, one {ratio:g} times as noisy"] = {
            "seen": seen,
            "nominal": 0.05,
        }
    for seeds in (3, 5, 10):
        difference = detectable(1.0, seeds)
        name = f"power, {seeds} seeds, difference {difference:.2f} sd"
        rows[name] = {
            "seen": found(trials, difference, seeds, rng),
            "nominal": power_of(difference, 1.0, seeds),
        }
    for difference, nominal in ((2.0, 0.05), (0.0, 1.0)):
        name = f"called equivalent within 2 sd, 10 seeds, true difference {difference:g} sd"
        seen = called_equivalent(trials, difference, 2.0, 10, rng)
        rows[name] = {"seen": seen, "nominal": nominal}
    return rows


def main() -> int:
    """Simulate, print a table and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    rows = simulate(args.trials, args.seed)
    for name, row in rows.items():
        print(f"{name:<75} {row['seen']:.4f}  (nominal {row['nominal']:.3f})")
    kept = {
        "trials": args.trials,
        "seed": args.seed,
        "seconds": round(time.monotonic() - began),
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
