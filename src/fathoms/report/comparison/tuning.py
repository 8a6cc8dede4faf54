"""Tuning curves: the score of every arm by the tuned value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from fathoms.drawing.ticks import ticks
from fathoms.report.comparison.arms import ArmView
from fathoms.report.comparison.scatter import Dot, Scatter, axis_labels, share
from fathoms.report.quantities import clipped, score, shown
from fathoms.report.run.files import listed, number, table

Trials = dict[float, list[float]]


def tuning_curves(
    arms: Sequence[ArmView], tuning: dict[str, Any], metric: str
) -> tuple[Scatter | None, list[str]]:
    """Mean score by tuned value, a line an arm, and remarks on trials without a score and values at the grid's edge.

    A grid over more than one option has no curve.
    """
    grid = list(table(tuning.get("grid")))
    remarks = _remarks(arms, tuning)
    if len(grid) != 1:
        return None, remarks
    option, found = clipped(str(grid[0]), 40), tuned_arms(tuning)
    own = ((arm, _trials(found.get(arm.name, {}), metric, grid[0])) for arm in arms)
    tried = [(arm, trials) for arm, trials in own if trials]
    return (_curves(option, tried, metric) if tried else None), remarks


def _remarks(arms: Sequence[ArmView], tuning: dict[str, Any]) -> list[str]:
    """A remark for each best value at the edge of the grid, and for trials that diverged or failed."""
    found, remarks = tuned_arms(tuning), []
    for arm in arms:
        own = found.get(arm.name, {})
        if lost := diverged(own):
            remarks.append(f"{arm.label}: diverged at {lost}")
        for option in map(str, listed(own.get("edge"))):
            best = clipped(shown(table(own.get("best")).get(option, "?")), 40)
            remarks.append(
                f"{arm.label}: the best {clipped(option, 40)}, {best}, is at the edge of the grid; "
                "a wider one may do better"
            )
        for choice in map(table, listed(own.get("failed"))):
            tried = clipped(", ".join(f"{name}={shown(value)}" for name, value in choice.items()), 80)
            remarks.append(f"{arm.label}: the trial of {tried} failed, so the best was chosen without it")
    return remarks


def diverged(own: dict[str, Any]) -> str:
    """The values at which an arm's trials diverged, as text; empty where none did.

    >>> diverged({"trials": [{"choice": {"lr": "4e-3"}, "status": "diverged"}, {"choice": {"lr": "1e-3"}}]})
    'lr 4e-3'
    """
    lost = [
        ", ".join(f"{name} {shown(value)}" for name, value in table(trial.get("choice")).items())
        for trial in map(table, listed(own.get("trials")))
        if trial.get("status") == "diverged"
    ]
    return clipped(" and ".join(lost), 80)


def tuned_arms(tuning: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The entry of each arm in tuning.json, by its name: `best`, its values by option, and `trials`."""
    return {str(own.get("name")): own for own in map(table, listed(tuning.get("arms")))}


def _trials(own: dict[str, Any], metric: str, option: str) -> Trials:
    """Scores by tuned value."""
    found: Trials = {}
    for trial in map(table, listed(own.get("trials"))):
        value, reached = tuned_value(table(trial.get("choice")).get(option)), number(trial.get(metric))
        if value is not None and reached is not None:
            found.setdefault(value, []).append(reached)
    return found


def _curves(option: str, tried: Sequence[tuple[ArmView, Trials]], metric: str) -> Scatter:
    means = [{x: sum(ys) / len(ys) for x, ys in sorted(trials.items())} for _, trials in tried]
    grid = sorted({x for own in means for x in own})
    heights = [y for own in means for y in own.values()]
    up = ticks(min(heights), max(heights), 5)
    low, span = math.log(grid[0]), math.log(grid[-1] / grid[0]) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return round(3 + 94 * (math.log(x) - low) / span, 2), 100 - share(y, up)

    dots, lines = [], []
    for (arm, trials), own in zip(tried, means, strict=True):
        lines.append(
            (arm.style, [(*a, *b) for a, b in itertools.pairwise(place(x, y) for x, y in own.items())])
        )
        for x, y in own.items():
            text = f"{arm.label}, {option} {x:g}: {score(y, metric)} over {len(trials[x])} trials"
            dots.append(Dot(*place(x, y), arm.style, text))
    marks = [(place(x, up[0])[0], f"{x:g}") for x in grid]
    return Scatter(
        option, "logarithmic", dots, marks, [(100 - at, text) for at, text in axis_labels(up)], lines
    )


def tuned_value(value: Any) -> float | None:
    """A tuned value, which may be written as text, if it has a logarithm."""
    try:
        found = number(float(value)) if isinstance(value, str) else number(value)
    except ValueError:
        return None
    return found if found is not None and found > 0 else None
