"""Simulate comparisons on planted truths, from scores to verdicts: errors, coverage, power and runs used.

    python benchmarks/compare_statistics.py --trials 20000 --jobs 2 --output results/compare_statistics.json

Every trial draws the scores of seeds and judges them with the functions of `fathoms.comparing`; tuned arms choose their
rate with those of `fathoms.comparing.tuning` from drawn trials (`compare_batches.py`). `--rows TEXT` runs the rows with
this text in their name. The same command goes on where it was cut off: rows of the output are not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compare_batches import BEST_OF, CHECKED, CURVES, Design, simulate
from fathoms.comparing.statistics import ALPHA

SPREADS = (0.3, 1.2, 0.8, 0.3, 1.2, 0.8, 0.5, 1.0, 0.3, 1.2, 0.8, 0.3, 1.2, 0.8, 0.5, 1.0)
"""Deviations over seeds as they were measured, four to one."""
EQUAL, UNEQUAL = "equal spreads", "spreads 1 to 4"
HELD = ALPHA
SHARES = "single shares"

Row = tuple[str, Design, float | None]


def named(seeds: tuple[int, ...]) -> str:
    """Looks in words."""
    return " or ".join(map(str, seeds)) + " seeds"


def without_tuning(pairs: int, spreads: str) -> Iterator[Row]:
    """Every plan of seeds, with and without runs that diverge."""
    kind = ("1 pair" if pairs == 1 else f"{pairs} pairs") + f", {spreads}"
    uneven = None if spreads == EQUAL else SPREADS[: pairs + 1]
    keep = (2 if pairs < 10 else 3, 3)
    for words, diverging in (("", 0.0), ("a run in five diverges, ", 0.2)):
        for seeds in ((3,), (5,), (10,), (3, 5, 10), (5, 10)):
            yield f"{words}{named(seeds)}, {kind}", Design(seeds, pairs, uneven, diverging=diverging), HELD
        if pairs > 1:
            for seeds in ((10,), (3, 5, 10)):
                design = Design(seeds, pairs, uneven, keep=keep, diverging=diverging)
                yield f"{words}{named(seeds)}, best {keep[0]} after 3, {kind}", design, HELD
    yield f"3 against 10 seeds, {kind}", Design((10,), pairs, uneven, fewer=3), HELD


def with_tuning(pairs: int, spreads: str) -> Iterator[Row]:
    """Plans of seeds whose arms are tuned by the parabola, with and without runs that diverge."""
    kind = ("1 pair" if pairs == 1 else f"{pairs} pairs") + f", {spreads}"
    scale = SPREADS[: pairs + 1] if spreads != EQUAL else (1.0,) * (pairs + 1)
    own = tuple(0.6 * sd for sd in scale)
    for words, diverging in (("", 0.0), ("a run in five diverges, ", 0.2)):
        for seeds in ((5,), (10,), (3, 5, 10)):
            if pairs < 10 or seeds == (5,):
                design = Design(seeds, pairs, own, curve="parabola", diverging=diverging)
                yield f"tuned, {words}{named(seeds)}, {kind}", design, HELD
        if pairs > 1:
            keep = (2 if pairs < 10 else 3, 3)
            design = Design((3, 5, 10), pairs, own, keep=keep, curve="parabola", diverging=diverging)
            yield f"tuned, {words}{named((3, 5, 10))}, best {keep[0]} after 3, {kind}", design, HELD


def by_curve() -> Iterator[Row]:
    """One pair that is tuned on each kind of curve, and what the best of single trials does there."""
    for curve in CURVES:
        for seeds in ((3,), (5,), (10,), (3, 5, 10)):
            design = Design(seeds, 1, (0.6, 0.6), curve=curve)
            yield f"tuned, curve: {curve}, {named(seeds)}, 1 pair", design, HELD
        control = Design((5,), 1, (0.6, 0.6), curve=curve, rule=BEST_OF)
        yield f"control: tuned by the best trial, curve: {curve}, 5 seeds, 1 pair", control, None


def powers() -> Iterator[Row]:
    """What finds one arm that is better, beside arms that are equal."""
    for pairs in (1, 5, 15):
        kind = "1 pair" if pairs == 1 else f"{pairs} pairs"
        for seeds in ((5,), (10,), (5, 10), (3, 5, 10)):
            yield f"power at 2 sd, {named(seeds)}, {kind}", Design(seeds, pairs, gain=2.0), HELD
        yield f"power at 4 sd, {named((3, 5, 10))}, {kind}", Design((3, 5, 10), pairs, gain=4.0), HELD
        if pairs > 1:
            keep = (2 if pairs < 10 else 3, 3)
            dropping = Design((10,), pairs, keep=keep, gain=2.0)
            yield f"power at 2 sd, 10 seeds, best {keep[0]} after 3, {kind}", dropping, HELD
    gain = Design((5,), 1, (0.6, 0.6), curve="parabola", gain=1.5)
    yield "power at 2.5 sd, tuned, 5 seeds, 1 pair", gain, HELD
    whole = Design((3, 5, 10), 5, (0.6,) * 6, keep=(2, 3), curve="parabola", gain=1.5)
    yield "power at 2.5 sd, tuned, 3 or 5 or 10 seeds, best 2 after 3, 5 pairs", whole, HELD
    control = dataclasses.replace(gain, rule=BEST_OF)
    yield "control: power at 2.5 sd, tuned by the best trial, 5 seeds, 1 pair", control, None


def designs() -> Iterator[Row]:
    """Every row: its name, its design, and the greatest error it may show; None for no bound."""
    for pairs in (1, 5):
        for spreads in (EQUAL, UNEQUAL):
            yield from without_tuning(pairs, spreads)
    for pairs in (1, 5):
        name = f"control: unplanned looks at 3, 5, 10 seeds, {pairs} pair" + "s" * (pairs > 1)
        yield name, Design((3, 5, 10), pairs, grown=True), None
    yield from powers()
    for spreads in (EQUAL, UNEQUAL):
        yield from with_tuning(1, spreads)
    yield from by_curve()
    for pairs, rows in ((15, without_tuning), (5, with_tuning), (15, with_tuning)):
        for spreads in (EQUAL, UNEQUAL):
            yield from rows(pairs, spreads)


def measured(task: tuple[str, int, int]) -> dict[str, dict[str, float | bool]]:
    """The rows of one task: a design by its name, or all single shares."""
    name, trials, seed = task
    # Each row has draws of its own, so that rows can be made in any order.
    rng = np.random.default_rng([seed, *name.encode()])
    if name == SHARES:
        found = {}
        from compare_shares import rates

        for share, seen, (low, high) in rates(trials, rng):
            slack = 2 * math.sqrt(ALPHA * (1 - ALPHA) / trials) if high == ALPHA else 0.0
            found[share] = {"seen": seen, "holds": low <= seen <= high + slack}
        return found
    design, most = next((design, most) for own, design, most in designs() if own == name)
    row = simulate(design, trials, rng)
    if most is None:
        return {name: row}
    # Two standard errors; intervals of a comparison share its error, so that each may miss as often.
    slack = 2 * math.sqrt(ALPHA * (1 - ALPHA) / trials)
    holds = row["error"] <= most + slack and row["coverage"] >= 1 - ALPHA - slack
    return {name: {**row, "holds": holds}}


def as_tables(kept: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rows = {name: row for name, row in kept["rows"].items() if "error" in row}
    wrong = [name for name, row in kept["rows"].items() if row.get("holds") is False]
    bound = ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / kept["trials"])
    lines = [
        "# The statistics of a comparison, simulated",
        "",
        f"`{kept['command']}`: {kept['trials']:,} comparisons a row, as arrays through the",
        f"functions that test, tune and share out the error; {CHECKED} of every 5,000 go through `judge` and",
        f"`wanted_seeds` one by one as well, and must come out the same. {len(kept['rows'])} rows; {len(wrong)} break",
        f"their bound, an error of {bound:.2%} (5 % and two standard errors). Arms are equal but where a row is on",
        "power. An interval has the level of Holm's step, so",
        "with several pairs each covers more often than 95 %; with one pair of few seeds Welch's test is cautious.",
        "`all` is the share of comparisons in which every printed interval holds the truth.",
        "",
        "| design | called different, % | an interval covers, % | all | power, % | runs | of fixed, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [
            f"{100 * row[key]:.1f}" if key in row else ""
            for key in ("error", "coverage", "coverage_of_all", "power")
        ]
        mark = " **breaks**" if name in wrong else ""
        lines.append(
            f"| {name}{mark} | {' | '.join(cells)} | {row['runs']:.1f} | {100 * row['runs_of_fixed']:.0f} |"
        )
    lines += ["", "| share | seen, % |", "|---|---|"]
    for name, row in kept["rows"].items():
        if "seen" in row:
            lines.append(f"| {name}{' **breaks**' if name in wrong else ''} | {100 * row['seen']:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Simulate what is not there yet and keep the numbers; 1 if one of them lies where it must not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    command = f"python benchmarks/compare_statistics.py --trials {args.trials}"
    kept: dict[str, Any] = {"command": command, "trials": args.trials, "seed": args.seed, "rows": {}}
    if args.output and args.output.is_file():
        before = json.loads(args.output.read_text())
        if (before["trials"], before["seed"]) == (args.trials, args.seed):
            kept = before
    names = [name for name, _, _ in designs() if args.rows in name and name not in kept["rows"]]
    if not args.rows and not any("seen" in row for row in kept["rows"].values()):
        names.insert(0, SHARES)
    tasks = [(name, args.trials, args.seed) for name in names]
    with multiprocessing.Pool(args.jobs) as pool:
        for rows in pool.imap_unordered(measured, tasks):
            kept["rows"] |= rows
            for name, row in rows.items():
                shown = "  ".join(f"{key} {value:.3f}" for key, value in row.items() if key != "holds")
                print(f"{name:<84} {shown}{'  WRONG' if row.get('holds') is False else ''}", flush=True)
            if args.output:
                order = [name for name, _, _ in designs() if name in kept["rows"]]
                order += [name for name in kept["rows"] if name not in order]
                kept["rows"] = {name: kept["rows"][name] for name in order}
                args.output.write_text(json.dumps(kept, indent=1) + "\n")
                args.output.with_suffix(".md").write_text(as_tables(kept))
    return int(any(row.get("holds") is False for row in kept["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
