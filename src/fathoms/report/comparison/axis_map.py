"""Heat maps of the mean score over two axes of a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fathoms.report.comparison.arms import ArmView
from fathoms.report.quantities import clipped, score

SHADES = 16
"""Shades of the style sheet, from the worst mean to the best."""
MOST_AXES = 6


@dataclass(frozen=True)
class Square:
    """The mean over all arms with these two values: text, shade (None: no score) and tooltip."""

    text: str
    shade: int | None
    title: str


@dataclass(frozen=True)
class AxisMap:
    """Mean score by the values of two axes."""

    down: str
    across: str
    columns: list[str]
    rows: list[tuple[str, list[Square]]]


def axes_of(arms: Sequence[ArmView]) -> dict[str, list[str]]:
    """Options with more than one value, each with its values in their order."""
    found: dict[str, list[str]] = {}
    for arm in arms:
        for name, value in arm.options.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: values for name, values in found.items() if len(values) > 1}


def axis_maps(arms: Sequence[ArmView], metric: str) -> list[AxisMap]:
    """A map for each pair of axes."""
    axes = dict(itertools.islice(axes_of(arms).items(), MOST_AXES))
    return [_map(arms, metric, down, across, axes) for down, across in itertools.combinations(axes, 2)]


def _map(arms: Sequence[ArmView], metric: str, down: str, across: str, axes: dict[str, list[str]]) -> AxisMap:
    squares: dict[tuple[str, str], list[float]] = {}
    for arm in arms:
        key = (arm.options.get(down, ""), arm.options.get(across, ""))
        squares.setdefault(key, []).extend(arm.scores)
    means = {key: sum(values) / len(values) for key, values in squares.items() if values}
    low, high = min(means.values(), default=0.0), max(means.values(), default=1.0)

    def square(key: tuple[str, str]) -> Square:
        if key not in means:
            return Square("–", None, f"{down}={key[0]}, {across}={key[1]}: no score")
        share = (means[key] - low) / ((high - low) or 1.0)
        shade = round((1 - share if metric == "loss" else share) * (SHADES - 1))
        title = (
            f"{down}={key[0]}, {across}={key[1]}: {score(means[key], metric)} over {len(squares[key])} runs"
        )
        return Square(score(means[key], metric), shade, clipped(title, 400))

    rows = [(clipped(value), [square((value, other)) for other in axes[across]]) for value in axes[down]]
    return AxisMap(clipped(down, 60), clipped(across, 60), [clipped(value) for value in axes[across]], rows)
