"""One panel of lines with its axes, linear or logarithmic, and a grid of such panels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fathoms.drawing.colours import INK, PALETTE, RULE, SOFT
from fathoms.drawing.picture import Picture
from fathoms.drawing.shapes import Dash, Point
from fathoms.drawing.ticks import log_ticks, short_number, tick_label, ticks

LEFT, RIGHT, TOP, BOTTOM = 56.0, 22.0, 34.0, 40.0
DOTS = 12
"""Most points of a line that is drawn with a dot on each."""
DASH = (4.0, 3.0)

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend, its points, its colour by number, whether it is dashed."""

    name: str
    points: Points
    colour: int = 0
    dashed: bool = False

    @property
    def dash(self) -> Dash:
        """Lengths of stroke and gap; None for a solid line."""
        return DASH if self.dashed else None


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    x_label: str
    series: list[Series]
    log_y: bool = False
    log_x: bool = False
    y_range: tuple[float, float] | None = None
    x_ticks: Sequence[float] | None = None
    notes: list[str] = field(default_factory=list)


def grid_of(panels: Sequence[Panel], title: str, columns: int = 2, size: Point = (360.0, 250.0)) -> Picture:
    """Panels side by side under one title and one legend."""
    rows = math.ceil(len(panels) / columns)
    names = list(
        dict.fromkeys((s.name, s.colour, s.dash) for panel in panels for s in panel.series if s.name)
    )
    width = columns * size[0]
    lines = _legend_lines(names, width)
    head = 34 + 16 * lines
    picture = Picture(width, rows * size[1] + head, title)
    picture.text((16, 22), title, size=14, bold=True)
    _legend(picture, names, width)
    for number, panel in enumerate(panels):
        corner = ((number % columns) * size[0], head + (number // columns) * size[1])
        draw_panel(picture, panel, corner, size)
    return picture


def _legend_lines(names: Sequence[tuple[str, int, Dash]], width: float) -> int:
    return 0 if len(names) < 2 else math.ceil(sum(_key_width(name) for name, _, _ in names) / (width - 32))


def _key_width(name: str) -> float:
    return 6.2 * len(name) + 44


def _legend(picture: Picture, names: Sequence[tuple[str, int, Dash]], width: float) -> None:
    if len(names) < 2:
        return
    x, y = 16.0, 40.0
    for name, colour, dash in names:
        if x + _key_width(name) > width and x > 16:
            x, y = 16.0, y + 16
        picture.line([(x, y - 4), (x + 20, y - 4)], PALETTE[colour % len(PALETTE)], 2, dash)
        picture.text((x + 26, y), name, colour=SOFT)
        x += _key_width(name)


@dataclass(frozen=True)
class _Axes:
    """Edges of one panel's plot, the range of its values, and the maps from values to the page."""

    left: float
    right: float
    top: float
    bottom: float
    low: float
    high: float
    across: Callable[[float], float]
    up: Callable[[float], float]

    def place(self, x: float, y: float) -> Point:
        """The place of a point, held inside the axes."""
        return self.across(x), self.up(min(max(y, self.low), self.high))


def draw_panel(picture: Picture, panel: Panel, corner: Point, size: Point) -> None:
    """Title, axes, lines and notes of one panel."""
    picture.text((corner[0] + 16, corner[1] + 18), panel.title, size=12, bold=True)
    if not any(shown(y, panel.log_y) for s in panel.series for _, y in s.points):
        at = (corner[0] + LEFT, corner[1] + size[1] / 2)
        picture.text(at, "nothing to show: no value above zero", colour=SOFT)
        return
    axes = _draw_axes(picture, panel, corner, size)
    for series in panel.series:
        _draw_series(picture, panel, series, axes)
    for row, note in enumerate(panel.notes):
        picture.text((axes.left + 8, axes.top + 12 + 14 * row), note, size=10, colour=INK)


def shown(y: float | None, log: bool) -> bool:
    """Whether a value can be drawn."""
    return y is not None and math.isfinite(y) and (y > 0 or not log)


def _draw_axes(picture: Picture, panel: Panel, corner: Point, size: Point) -> _Axes:
    left, top = corner[0] + LEFT, corner[1] + TOP
    right, bottom = corner[0] + size[0] - RIGHT, corner[1] + size[1] - BOTTOM
    xs = [x for s in panel.series for x, _ in s.points]
    ys = [y for s in panel.series for _, y in s.points if y is not None and shown(y, panel.log_y)]
    low, high = panel.y_range or (min(ys), max(ys))
    y_ticks = _ticks(low, high, panel.log_y, 5)
    if panel.y_range is None:
        low, high = min(low, min(y_ticks)), max(high, max(y_ticks))
    across = _scale(min(xs), max(xs), (left, right), panel.log_x)
    up = _scale(low, high, (bottom, top), panel.log_y)
    for value, label in y_ticks.items():
        if low <= value <= high:
            picture.line([(left, up(value)), (right, up(value))], RULE, 0.8)
            picture.text((left - 6, up(value) + 3.5), label, size=10, anchor="end", colour=SOFT)
    chosen = None if panel.x_ticks is None else {value: short_number(value) for value in panel.x_ticks}
    for value, label in (chosen or _ticks(min(xs), max(xs), panel.log_x, _x_count(xs))).items():
        if min(xs) <= value <= max(xs):
            picture.text((across(value), bottom + 15), label, size=10, anchor="middle", colour=SOFT)
    picture.line([(left, bottom), (right, bottom)], SOFT, 0.8)
    picture.text((right, bottom + 30), panel.x_label, size=10, anchor="end", colour=SOFT)
    return _Axes(left, right, top, bottom, low, high, across, up)


def _x_count(xs: Sequence[float]) -> int:
    """Steps between ticks across, at most one for each whole number: there is no half of a block or of an update."""
    whole = all(float(x).is_integer() for x in xs)
    return max(1, min(6, int(max(xs) - min(xs)))) if whole else 6


def _draw_series(picture: Picture, panel: Panel, series: Series, axes: _Axes) -> None:
    """A line that is broken where there is no value, with dots where there are few."""
    colour = PALETTE[series.colour % len(PALETTE)]
    run: list[Point] = []
    for x, y in [*series.points, (0.0, None)]:
        if y is not None and shown(y, panel.log_y):
            run.append(axes.place(x, y))
            if len(series.points) <= DOTS:
                picture.dot(run[-1], colour)
            continue
        if len(run) > 1:
            picture.line(run, colour, 1.8, series.dash)
        run = []


def _scale(low: float, high: float, ends: Point, log: bool) -> Callable[[float], float]:
    """A function from values to places."""
    a, b = (math.log(low), math.log(high)) if log else (low, high)
    span = (b - a) or 1.0
    return lambda value: ends[0] + ((math.log(value) if log else value) - a) / span * (ends[1] - ends[0])


def _ticks(low: float, high: float, log: bool, count: int) -> dict[float, str]:
    """Ticks that enclose the values, each with its text."""
    if log:
        return {value: short_number(value) for value in log_ticks(low, high, count)}
    values = ticks(low, high, count)
    return {value: tick_label(value, values[1] - values[0]) for value in values}
