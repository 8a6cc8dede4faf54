"""Strips: a row per arm or pair with its dots and its interval, placed in percent so that they fit any width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fathoms.drawing.ticks import tick_label, ticks
from fathoms.report.comparison.arms import ArmView
from fathoms.report.comparison.files import ComparisonRecord
from fathoms.report.quantities import clipped, score
from fathoms.report.run.files import listed, number, table

WORDS = {"a better": "the first is better", "b better": "the second is better"}
"""Verdicts as a reader of "A − B" understands them."""
MOST_PAIRS = 60
"""Pairs that are drawn; a page of a thousand is not read."""


@dataclass(frozen=True)
class Strip:
    """One row: its name, its dots with their tooltips, its interval, and the numbers beside it."""

    name: str
    style: str
    dots: list[tuple[float, str]]
    mean: float | None
    low: float | None
    high: float | None
    text: str
    remark: str


@dataclass(frozen=True)
class Strips:
    """Rows on one scale; `zero` and `band` are places of no difference and of differences too small to matter."""

    rows: list[Strip]
    marks: list[tuple[float, str]]
    zero: float | None = None
    band: tuple[float, float] | None = None
    left_out: int = 0


class Scale:
    """From values to percent of a strip's width."""

    def __init__(self, values: Sequence[float]) -> None:
        self.marks = ticks(min(values), max(values), 5)
        self.low, self.high = self.marks[0], self.marks[-1]

    def place(self, value: float) -> float:
        """The place of a value, with room for a dot at both ends."""
        return round(2 + 96 * (value - self.low) / (self.high - self.low), 2)

    def labels(self) -> list[tuple[float, str]]:
        """The tick marks."""
        return [(self.place(mark), tick_label(mark, self.marks[1] - self.marks[0])) for mark in self.marks]


def score_strips(arms: Sequence[ArmView], metric: str) -> Strips | None:
    """Scores of every seed with the mean and its interval, an arm a row; None before a score."""
    values = [value for arm in arms for value in arm.scores]
    if not values:
        return None
    spread = [side for arm in arms if arm.interval for side in arm.interval]
    # One noisy arm must not squeeze all others: intervals may widen the scale by no more than its own width.
    room = max(max(values) - min(values), 1e-9)
    bounded = [min(max(side, min(values) - room), max(values) + room) for side in spread]
    if metric == "top1":
        bounded = [min(max(side, 0.0), 100.0) for side in bounded]
    scale = Scale([*values, *bounded])
    rows = []
    for arm in arms:
        low, high = arm.interval or (None, None)
        dots = [
            (scale.place(value), f"{arm.label}, seed {clipped(cell.seed, 20)}: {score(value, metric)}")
            for cell in arm.cells
            if (value := cell.score(metric)) is not None
        ]
        text = score(arm.mean, metric)
        if low is not None and high is not None:
            text += f" ({score(low, metric)} to {score(high, metric)})"
        lost = [
            f"{arm.having(word)} {word}" for word in ("diverged", "failed", "stalled") if arm.having(word)
        ]
        rows.append(
            Strip(
                arm.label,
                arm.style,
                dots,
                None if arm.mean is None else scale.place(arm.mean),
                _inside(low, scale),
                _inside(high, scale),
                text,
                ", ".join(lost),
            )
        )
    return Strips(rows, scale.labels())


def difference_strips(arms: Sequence[ArmView], comparison: ComparisonRecord) -> Strips | None:
    """The corrected interval of every pair that was tested, largest difference first; None without verdicts."""
    margin = number(comparison.results.get("margin"), 0.0)
    labels = {arm.name: arm.label for arm in arms}
    tested = [row for row in map(table, listed(comparison.results.get("verdicts"))) if _interval(row)]
    if not tested:
        return None
    tested.sort(key=lambda row: -abs(number(row.get("difference"), 0.0)))
    kept = tested[:MOST_PAIRS]
    sides = [value for row in kept for value in _interval(row) or ()]
    scale = Scale([*sides, -margin, margin, 0.0])
    rows = []
    for row in kept:
        low, high = _interval(row) or (0.0, 0.0)
        a, b = (labels.get(str(row.get(key)), clipped(str(row.get(key)))) for key in ("a", "b"))
        difference, p = number(row.get("difference")), number(row.get("p"))
        middle, least, most = (score(value, comparison.metric) for value in (difference, low, high))
        text = f"{middle} ({least} to {most})"
        remark = WORDS.get(str(row.get("verdict")), str(row.get("verdict")))
        remark += "" if p is None else f", p = {p:.2g}"
        if (ahead := number(row.get("win_share"))) is not None:
            remark += f", first ahead in {ahead:.0%} of pairs of runs"
        if (further := _new_images(row)) is not None:
            wider = [score(value, comparison.metric) for value in further]
            remark += "" if wider == [least, most] else f"; on new images {wider[0]} to {wider[1]}"
        mean = None if difference is None else scale.place(difference)
        style = "sure" if str(row.get("verdict")).endswith("better") else "unsure"
        rows.append(
            Strip(
                f"{a} − {b}",
                style,
                [],
                mean,
                scale.place(low),
                scale.place(high),
                text,
                clipped(remark),
            )
        )
    band = (scale.place(-margin), round(scale.place(margin) - scale.place(-margin), 2))
    return Strips(rows, scale.labels(), scale.place(0.0), band, len(tested) - len(kept))


def _inside(value: float | None, scale: Scale) -> float | None:
    """The place of an end of an interval, at the edge of the strip where it lies beyond."""
    return None if value is None else scale.place(min(max(value, scale.low), scale.high))


def _interval(row: dict[str, Any]) -> tuple[float, float] | None:
    low, high = number(row.get("low")), number(row.get("high"))
    return None if low is None or high is None else (low, high)


def _new_images(row: dict[str, Any]) -> tuple[float, float] | None:
    """The interval that holds for new images too, where it is known."""
    sides = [value for side in listed(row.get("new_images"))[:2] if (value := number(side)) is not None]
    return (sides[0], sides[1]) if len(sides) == 2 else None
