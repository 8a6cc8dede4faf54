"""Figures of a comparison as SVG files: scores by seed, differences, learning curves, tuning, cost, two axes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fathoms.drawing.colours import BAND, INK, PALETTE, PAPER, RULE, SOFT, ramp_colour
from fathoms.drawing.picture import Picture
from fathoms.drawing.shapes import Dash, Point
from fathoms.drawing.ticks import tick_label, ticks
from fathoms.files.atomic import write_atomic
from fathoms.report.comparison.arms import MARKS, ArmView, arms_of
from fathoms.report.comparison.axis_map import SHADES, AxisMap, axis_maps
from fathoms.report.comparison.files import ComparisonRecord
from fathoms.report.comparison.scatter import Scatter, cost_scatters
from fathoms.report.comparison.series import CURVES, arm_lines, best_first, epoch_grid
from fathoms.report.comparison.strips import Strips, difference_strips, score_strips
from fathoms.report.comparison.tuning import diverged, tuned_arms, tuning_curves
from fathoms.report.quantities import clipped

FOLDER = "figures"
OURS = re.compile(
    r"(scores|differences|tuning|curves-(val|train)-(top1|loss)|axes-\d+-[\w-]+"
    r"|cost-(training-time|peak-memory|images-per-second))\.svg",
    re.ASCII,
)
"""Names of the figures that `figures` makes."""
WIDTH, ROW = 760, 24
PLOT = 300
"""Height of a plot's area."""
BEST = 8
"""Arms whose curves are drawn, as on the page."""
DASHES: tuple[Dash, ...] = (None, (7, 4), (2, 4))
LETTER = 6.1
"""Width of a letter at the size of these texts, about."""


def figures(comparison: ComparisonRecord) -> dict[str, str]:
    """Every figure that there are numbers for, by its file name."""
    arms, metric = arms_of(comparison), comparison.metric
    what = "Accuracy in percent" if metric == "top1" else "Loss"
    made: dict[str, str] = {}
    if (scores := score_strips(arms, metric)) is not None:
        made["scores.svg"] = draw_strips(scores, f"{what} by seed, mean and its 95 % interval")
    if (gaps := difference_strips(arms, comparison)) is not None:
        made["differences.svg"] = draw_strips(gaps, "Differences with their corrected intervals")
    for split, field, title, unit in CURVES:
        if (drawn := draw_curves(arms, split, field, f"{title}{f', {unit}' if unit else ''}")) is not None:
            made[f"curves-{split}-{field}.svg"] = drawn
    tuned, _ = tuning_curves(arms, comparison.tuning, metric)
    if tuned is not None:
        found = tuned_arms(comparison.tuning)
        lost = {arm.label: diverged(found.get(arm.name, {})) for arm in arms}
        entries = [
            (f"{name}, diverged at {lost[name]}" if lost[name] else name, style)
            for name, style in legend(arms)
        ]
        made["tuning.svg"] = draw_plane(tuned, entries, f"{what} on val by {tuned.title}, logarithmic")
    for cost in cost_scatters(arms, metric):
        unit = f" in {cost.unit}" if cost.unit else ""
        made[f"cost-{_plain(cost.title)}.svg"] = draw_plane(
            cost, legend(arms), f"{what} by {cost.title}{unit}"
        )
    for place, board in enumerate(axis_maps(arms, metric), start=1):
        made[f"axes-{place}-{_plain(board.down)}-{_plain(board.across)}.svg"] = draw_map(board, what)
    return made


def write_figures(folder: Path, comparison: ComparisonRecord) -> None:
    """Write the figures into `figures/`; those of an earlier time that no longer apply go, other files stay."""
    target, made = folder / FOLDER, figures(comparison)
    if target.is_symlink():
        return
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        if OURS.fullmatch(old.name) and old.name not in made and not old.is_dir():
            old.unlink()
    for name, text in made.items():
        write_atomic(target / name, text.encode(errors="replace"))
    if not any(target.iterdir()):
        target.rmdir()


def _plain(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"\W+", "-", name, flags=re.ASCII).strip("-")[:40] or "axis"


def paint(style: str) -> tuple[str, Dash]:
    """Colour and dashes of the classes of an arm.

    >>> paint("c1 m2")
    ('#d55e00', (2, 4))
    """
    words = style.split()
    if len(words) != 2 or not (words[0][1:] + words[1][1:]).isdigit():
        return (INK if style == "sure" else SOFT), None
    return PALETTE[int(words[0][1:]) % len(PALETTE)], DASHES[int(words[1][1:]) % MARKS]


def text_width(texts: Sequence[str], most: float) -> float:
    """Room for the longest of some texts, at most `most`."""
    return min(most, LETTER * max((len(text) for text in texts), default=0) + 10)


def titled(width: float, height: float, title: str) -> Picture:
    """An empty figure under its title."""
    figure = Picture(width, height, title)
    figure.text((12, 22), title, size=13)
    return figure


def draw_strips(made: Strips, title: str) -> str:
    """A row for each arm or pair: its dots, its interval and its numbers."""
    names = [clipped(row.name, 48) for row in made.rows]
    notes = [clipped(f"{row.text}  {row.remark}".strip(), 64) for row in made.rows]
    left, right = text_width(names, 310), text_width(notes, 400)
    width = max(WIDTH, left + right + 300)
    figure = titled(width, 44 + ROW * len(made.rows) + 26, title)
    top, bottom = 36, 36 + ROW * len(made.rows)

    def place(percent: float) -> float:
        return left + 12 + percent / 100 * (width - left - right - 36)

    if made.band is not None:
        begin, end = place(made.band[0]), place(sum(made.band))
        figure.box((begin, top), (end - begin, bottom - top), BAND)
    for at, text in made.marks:
        figure.line([(place(at), top), (place(at), bottom)], RULE)
        figure.text((place(at), bottom + 16), text, anchor="middle", colour=SOFT)
    if made.zero is not None:
        figure.line([(place(made.zero), top), (place(made.zero), bottom)], SOFT)
    for number, row in enumerate(made.rows):
        y, (colour, _) = top + ROW * (number + 0.5), paint(row.style)
        figure.text((12, y + 4), names[number])
        if row.low is not None and row.high is not None:
            figure.line([(place(row.low), y), (place(row.high), y)], colour, 2.4)
        for at, tip in row.dots:
            _dot(figure, (place(at), y), colour, tip)
        if row.mean is not None:
            figure.line([(place(row.mean), y - 8), (place(row.mean), y + 8)], colour, 2.4)
        figure.text((width - right, y + 4), notes[number], colour=SOFT)
    return figure.svg()


def _dot(figure: Picture, at: Point, colour: str, tip: str = "") -> None:
    """A run; runs at the same place are seen through each other."""
    figure.dot(at, colour, 3.4, opacity=0.8, tip=tip)


class Plane:
    """The area of a plot under a title, with a legend below."""

    def __init__(self, title: str, entries: Sequence[tuple[str, str]]) -> None:
        self.figure = titled(WIDTH, 40 + PLOT + 30 + 16 * len(entries) + 12, title)
        for row, (name, style) in enumerate(entries):
            y, (colour, dash) = 40 + PLOT + 42 + 16 * row, paint(style)
            self.figure.line([(60, y - 4), (82, y - 4)], colour, 2.4, dash)
            self.figure.text((90, y), clipped(name, 100))

    def at(self, across: float, down: float) -> Point:
        """The place of a point in percent of the area."""
        return 60 + across / 100 * (WIDTH - 84), 36 + down / 100 * PLOT

    def axes(self, across: Sequence[tuple[float, str]], down: Sequence[tuple[float, str]]) -> None:
        """Ticks of both axes, with lines for the vertical one."""
        for place, text in down:
            (left, y), right = self.at(0, place), self.at(100, place)
            self.figure.line([(left, y), right], RULE)
            self.figure.text((left - 8, y + 4), text, anchor="end", colour=SOFT)
        for place, text in across:
            x, y = self.at(place, 100)
            self.figure.text((x, y + 18), text, anchor="middle", colour=SOFT)


def legend(arms: Sequence[ArmView]) -> list[tuple[str, str]]:
    """Name and style of as many arms as can be told apart."""
    return [(arm.label, arm.style) for arm in arms[: len(PALETTE) * MARKS]]


def draw_plane(made: Scatter, entries: Sequence[tuple[str, str]], title: str) -> str:
    """Dots, and lines where they have an order, above their legend."""
    plane = Plane(title, entries)
    plane.axes(made.x_marks, made.y_marks)
    for style, pieces in made.lines:
        colour, dash = paint(style)
        for x1, y1, x2, y2 in pieces:
            plane.figure.line([plane.at(x1, y1), plane.at(x2, y2)], colour, 1.8, dash)
    for dot in made.dots:
        _dot(plane.figure, plane.at(dot.x, dot.y), paint(dot.style)[0], dot.text)
    return plane.figure.svg()


def draw_curves(arms: Sequence[ArmView], split: str, field: str, title: str) -> str | None:
    """The mean over seeds by epoch with a band from the lowest to the highest, of the best arms."""
    grid = epoch_grid(arms)
    lines = {arm.index: arm_lines(arm, split, field, grid) for arm in best_first(arms)[:BEST]}
    shown = [arm for arm in best_first(arms)[:BEST] if lines[arm.index]]
    if not shown:
        return None
    every = np.concatenate([np.stack(lines[arm.index]).ravel() for arm in shown])
    up = ticks(float(np.nanmin(every)), float(np.nanmax(every)), 5)
    first, last = float(grid[0]), float(grid[-1])
    plane = Plane(f"{title}, by epoch", [(arm.label, arm.style) for arm in shown])

    def at(x: float, y: float) -> Point:
        return plane.at(
            100 * (x - first) / ((last - first) or 1.0), 100 - 100 * (y - up[0]) / (up[-1] - up[0])
        )

    step = up[1] - up[0]
    epochs = [mark for mark in ticks(first, last, 8) if first <= mark <= last and mark == int(mark)]
    plane.axes(
        [(100 * (mark - first) / ((last - first) or 1.0), f"{mark:g}") for mark in epochs],
        [(100 - 100 * (mark - up[0]) / (up[-1] - up[0]), tick_label(mark, step)) for mark in up],
    )
    for arm in shown:
        stacked = np.stack(lines[arm.index]).astype(float)
        known = ~np.isnan(stacked).all(axis=0)
        xs, values = grid[known].tolist(), stacked[:, known]
        low, mean, high = (reduce(values, axis=0).tolist() for reduce in (np.nanmin, np.nanmean, np.nanmax))
        colour, dash = paint(arm.style)
        outline = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        plane.figure.area([at(x, y) for x, y in outline], colour)
        plane.figure.line([at(x, y) for x, y in zip(xs, mean, strict=True)], colour, 1.8, dash)
        if len(xs) == 1:
            _dot(plane.figure, at(xs[0], mean[0]), colour)
    return plane.figure.svg()


def draw_map(board: AxisMap, what: str) -> str:
    """The mean score by the values of two axes, as shaded squares."""
    names = [clipped(name, 40) for name, _ in board.rows]
    left, size = text_width(names, 260) + 12, 92.0
    title = f"{what}: {board.down} down, {board.across} across"
    width = max(left + size * len(board.columns) + 20, text_width([title], 900) + 60)
    figure = titled(width, 70 + 34 * len(board.rows), title)
    for column, name in enumerate(board.columns):
        figure.text((left + size * (column + 0.5), 48), clipped(name, 14), anchor="middle")
    for row, (_, squares) in enumerate(board.rows):
        y = 56 + 34 * row
        figure.text((left - 10, y + 20), names[row], anchor="end")
        for column, square in enumerate(squares):
            share = None if square.shade is None else square.shade / (SHADES - 1)
            fill = RULE if share is None else ramp_colour(share)
            ink = PAPER if share is not None and share < 0.45 else INK
            figure.box((left + size * column, y), (size - 2, 32), fill)
            figure.text((left + size * (column + 0.5), y + 20), square.text, anchor="middle", colour=ink)
    return figure.svg()
