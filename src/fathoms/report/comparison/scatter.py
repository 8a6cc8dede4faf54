"""Scatter plots: the score of every run against what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fathoms.drawing.ticks import tick_label, ticks
from fathoms.report.comparison.arms import ArmView
from fathoms.report.comparison.files import CellRecord
from fathoms.report.quantities import clipped, duration, file_size, score


@dataclass(frozen=True)
class Dot:
    """A run: its place in percent, the classes of its arm, its tooltip."""

    x: float
    y: float
    style: str
    text: str


@dataclass(frozen=True)
class Scatter:
    """Dots with their axes; lines join dots of one arm where there is an order."""

    title: str
    unit: str
    dots: list[Dot]
    x_marks: list[tuple[float, str]]
    y_marks: list[tuple[float, str]]
    lines: list[tuple[str, list[tuple[float, float, float, float]]]]


def cost_scatters(arms: Sequence[ArmView], metric: str) -> list[Scatter]:
    """The score against training time, peak memory and images per second, where they are known."""
    kinds: list[tuple[str, str, float, Callable[[CellRecord], float | None], Callable[[float], str]]] = [
        ("training time", "s", 1.0, lambda cell: cell.seconds, duration),
        ("peak memory", "GB", 1e9, lambda cell: cell.memory, file_size),
        ("images per second", "", 1.0, lambda cell: cell.speed, lambda value: f"{value:,.0f}"),
    ]
    made = []
    for title, unit, scale, read, write in kinds:
        points = [
            (
                cost / scale,
                value,
                arm,
                f"{arm.label}, seed {clipped(cell.seed, 20)}: {score(value, metric)}, {write(cost)}",
            )
            for arm in arms
            for cell in arm.cells
            if (cost := read(cell)) is not None and (value := cell.score(metric)) is not None
        ]
        if points:
            made.append(_scatter(title, unit, points))
    return made


def _scatter(title: str, unit: str, points: Sequence[tuple[float, float, ArmView, str]]) -> Scatter:
    across = ticks(min(p[0] for p in points), max(p[0] for p in points), 4)
    up = ticks(min(p[1] for p in points), max(p[1] for p in points), 5)
    dots = [Dot(share(x, across), 100 - share(y, up), arm.style, text) for x, y, arm, text in points]
    return Scatter(
        title, unit, dots, axis_labels(across), [(100 - at, text) for at, text in axis_labels(up)], []
    )


def share(value: float, marks: Sequence[float]) -> float:
    """The place of a value between the first and the last mark, in percent."""
    return round(3 + 94 * (value - marks[0]) / (marks[-1] - marks[0]), 2)


def axis_labels(marks: Sequence[float]) -> list[tuple[float, str]]:
    """Places and texts of tick marks."""
    return [(share(mark, marks), tick_label(mark, marks[1] - marks[0])) for mark in marks]
