"""Geometry of line charts: axes, ticks and lines. The template draws them as SVG."""

from __future__ import annotations

from dataclasses import dataclass

from fathoms.drawing.ticks import tick_label, ticks

Points = list[tuple[float, float | None]]

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 68, 16, 12, 46
DOTS = 48
"""Most points of a line that is drawn with a dot on each."""


@dataclass(frozen=True)
class Line:
    """One series: its name, the class that colours it, its path and the points on it."""

    name: str
    style: str
    path: str
    dots: list[tuple[float, float, str]]


@dataclass(frozen=True)
class Chart:
    """A chart ready to be drawn; `points` are shown on hover."""

    key: str
    title: str
    unit: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    points: dict[str, Points]
    x_range: tuple[float, float]
    x_name: str = "epoch"


def draw(
    key: str,
    title: str,
    series: dict[str, tuple[str, Points]],
    unit: str = "",
    floor: float | None = None,
    x_name: str = "epoch",
) -> Chart | None:
    """A chart of named series, each with its class; None where there is nothing to draw.

    Args:
        key: Its key in the page's data.
        title: Its title.
        series: Name to class and points.
        unit: Unit printed after a value.
        floor: Upper bound of the lower end of the vertical axis.
        x_name: What the horizontal axis counts.
    """
    kept = {name: points for name, (_, points) in series.items() if any(y is not None for _, y in points)}
    if not kept:
        return None
    xs = [x for points in kept.values() for x, _ in points]
    ys = [y for points in kept.values() for _, y in points if y is not None]
    x_low, x_high = min(*xs, max(xs) - 1, 1.0), max(xs)
    marks = ticks(min(ys if floor is None else [*ys, floor]), max(ys), 5)
    y_low, y_high = marks[0], marks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / ((x_high - x_low) or 1) * (WIDTH - LEFT - RIGHT)
        up = HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(up, 1)

    lines = []
    for name, points in kept.items():
        path, dots, pen = [], [], "M"
        for x, y in points:
            if y is None:
                pen = "M"
                continue
            across, up = place(x, y)
            path.append(f"{pen}{across} {up}")
            pen = "L"
            if len(points) <= DOTS:
                dots.append((across, up, f"{name}, {x_name} {x:g}: {y:.5g}{unit}"))
        lines.append(Line(name, series[name][0], " ".join(path), dots))
    marks_across = [mark for mark in ticks(x_low, x_high, 8) if x_low <= mark <= x_high and mark == int(mark)]
    step = marks[1] - marks[0]
    return Chart(
        key,
        title,
        unit,
        lines,
        [(place(mark, y_low)[0], f"{mark:,.0f}") for mark in marks_across],
        [(place(x_low, mark)[1], tick_label(mark, step)) for mark in marks],
        kept,
        (x_low, x_high),
        x_name,
    )
