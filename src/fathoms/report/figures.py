"""Figures of a comparison as SVG files: scores by seed, differences, learning curves, tuning, cost, two axes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fathoms.atomic import write_atomic
from fathoms.report.arms import Arm, arms_of
from fathoms.report.axis_map import SHADES, AxisMap, axis_maps
from fathoms.report.chart import label, ticks
from fathoms.report.comparison_files import Comparison
from fathoms.report.heatmap import colour as shade_colour
from fathoms.report.quantities import clipped
from fathoms.report.scatter import Scatter, cost_scatters
from fathoms.report.series import CURVES, arm_lines, best_first, epoch_grid
from fathoms.report.strips import Strips, difference_strips, score_strips
from fathoms.report.svg import BAND, INK, RULE, SOFT, Canvas, paint, text_width
from fathoms.report.tuning import tuning_curves

FOLDER = "figures"
WIDTH, ROW = 760, 24
PLOT = 300
"""Height of a plot's area."""
BEST = 8
"""Arms whose curves are drawn, as on the page."""


def figures(comparison: Comparison) -> dict[str, str]:
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
        made["tuning.svg"] = draw_plane(tuned, arms, f"{what} on val by {tuned.title}, logarithmic")
    for cost in cost_scatters(arms, metric):
        unit = f" in {cost.unit}" if cost.unit else ""
        made[f"cost-{_plain(cost.title)}.svg"] = draw_plane(cost, arms, f"{what} by {cost.title}{unit}")
    for place, board in enumerate(axis_maps(arms, metric), start=1):
        made[f"axes-{place}-{_plain(board.down)}-{_plain(board.across)}.svg"] = draw_map(board, what)
    return made


def write_figures(folder: Path, comparison: Comparison) -> None:
    """Write the figures into `figures/`; those of an earlier time that no longer apply go."""
    target, made = folder / FOLDER, figures(comparison)
    if target.is_symlink():
        return
    target.mkdir(exist_ok=True)
    for old in target.glob("*.svg"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        write_atomic(target / name, text.encode(errors="replace"))
    if not made:
        shutil.rmtree(target)


def _plain(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"\W+", "-", name, flags=re.ASCII).strip("-")[:40] or "axis"


def draw_strips(made: Strips, title: str) -> str:
    """A row for each arm or pair: its dots, its interval and its numbers."""
    names = [clipped(row.name, 48) for row in made.rows]
    notes = [clipped(f"{row.text}  {row.remark}".strip(), 64) for row in made.rows]
    left, right = text_width(names, 310), text_width(notes, 400)
    width = max(WIDTH, left + right + 300)
    canvas = Canvas(width, 44 + ROW * len(made.rows) + 26, title)
    canvas.text(12, 22, title, colour=INK, size=13)
    bottom = 36 + ROW * len(made.rows)

    def place(percent: float) -> float:
        return left + 12 + percent / 100 * (width - left - right - 36)

    if made.band is not None:
        canvas.box(place(made.band[0]), 36, place(sum(made.band)) - place(made.band[0]), bottom - 36, BAND)
    for at, text in made.marks:
        canvas.line(place(at), 36, place(at), bottom)
        canvas.text(place(at), bottom + 16, text, "middle")
    if made.zero is not None:
        canvas.line(place(made.zero), 36, place(made.zero), bottom, SOFT)
    for number, row in enumerate(made.rows):
        y, (colour, _) = 36 + ROW * (number + 0.5), paint(row.style)
        canvas.text(12, y + 4, names[number], colour=INK)
        if row.low is not None and row.high is not None:
            canvas.line(place(row.low), y, place(row.high), y, colour, 2.4)
        for at, tip in row.dots:
            canvas.dot(place(at), y, colour, tip)
        if row.mean is not None:
            canvas.line(place(row.mean), y - 8, place(row.mean), y + 8, colour, 2.4)
        canvas.text(width - right, y + 4, notes[number])
    return canvas.markup()


class Plane:
    """The area of a plot on a canvas with a title above and a legend below."""

    def __init__(self, title: str, entries: Sequence[tuple[str, str]]) -> None:
        self.canvas = Canvas(WIDTH, 40 + PLOT + 30 + 16 * len(entries) + 12, title)
        self.canvas.text(12, 22, title, colour=INK, size=13)
        self.canvas.legend(entries, 40 + PLOT + 42, 60)

    def at(self, across: float, down: float) -> tuple[float, float]:
        """The pixel of a place in percent of the area."""
        return 60 + across / 100 * (WIDTH - 84), 36 + down / 100 * PLOT

    def marks(self, across: Sequence[tuple[float, str]], down: Sequence[tuple[float, str]]) -> None:
        """Ticks of both axes, with lines for the vertical one."""
        for place, text in down:
            (x1, y), (x2, _) = self.at(0, place), self.at(100, place)
            self.canvas.line(x1, y, x2, y)
            self.canvas.text(x1 - 8, y + 4, text, "end")
        for place, text in across:
            x, y = self.at(place, 100)
            self.canvas.text(x, y + 18, text, "middle")


def draw_plane(made: Scatter, arms: Sequence[Arm], title: str) -> str:
    """Dots, and lines where they have an order."""
    plane = Plane(title, [(arm.label, arm.style) for arm in arms[:21]])
    plane.marks(made.x_marks, made.y_marks)
    for style, pieces in made.lines:
        colour, dash = paint(style)
        for x1, y1, x2, y2 in pieces:
            plane.canvas.line(*plane.at(x1, y1), *plane.at(x2, y2), colour, 1.8, dash)
    for dot in made.dots:
        plane.canvas.dot(*plane.at(dot.x, dot.y), paint(dot.style)[0], dot.text)
    return plane.canvas.markup()


def draw_curves(arms: Sequence[Arm], split: str, field: str, title: str) -> str | None:
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

    def at(x: float, y: float) -> tuple[float, float]:
        return plane.at(
            100 * (x - first) / ((last - first) or 1.0), 100 - 100 * (y - up[0]) / (up[-1] - up[0])
        )

    step = up[1] - up[0]
    epochs = [mark for mark in ticks(first, last, 8) if first <= mark <= last and mark == int(mark)]
    plane.marks(
        [(100 * (mark - first) / ((last - first) or 1.0), f"{mark:g}") for mark in epochs],
        [(100 - 100 * (mark - up[0]) / (up[-1] - up[0]), label(mark, step)) for mark in up],
    )
    for arm in shown:
        stacked = np.stack(lines[arm.index]).astype(float)
        known = ~np.isnan(stacked).all(axis=0)
        xs, values = grid[known].tolist(), stacked[:, known]
        low, mean, high = (reduce(values, axis=0).tolist() for reduce in (np.nanmin, np.nanmean, np.nanmax))
        colour, dash = paint(arm.style)
        outline = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        plane.canvas.area([at(x, y) for x, y in outline], colour)
        plane.canvas.path([at(x, y) for x, y in zip(xs, mean, strict=True)], colour, dash)
        if len(xs) == 1:
            plane.canvas.dot(*at(xs[0], mean[0]), colour)
    return plane.canvas.markup()


def draw_map(board: AxisMap, what: str) -> str:
    """The mean score by the values of two axes, as shaded squares."""
    names = [clipped(name, 40) for name, _ in board.rows]
    left, size = text_width(names, 260) + 12, 92.0
    title = f"{what}: {board.down} down, {board.across} across"
    width = max(left + size * len(board.columns) + 20, text_width([title], 900) + 60)
    canvas = Canvas(width, 70 + 34 * len(board.rows), title)
    canvas.text(12, 22, title, colour=INK, size=13)
    for column, name in enumerate(board.columns):
        canvas.text(left + size * (column + 0.5), 48, clipped(name, 14), "middle", INK)
    for row, (_, squares) in enumerate(board.rows):
        y = 56 + 34 * row
        canvas.text(left - 10, y + 20, names[row], "end", INK)
        for column, square in enumerate(squares):
            share = None if square.shade is None else square.shade / (SHADES - 1)
            fill = RULE if share is None else shade_colour(share)
            ink = "#ffffff" if share is not None and share < 0.45 else INK
            canvas.box(left + size * column, y, size - 2, 32, fill)
            canvas.text(left + size * (column + 0.5), y + 20, square.text, "middle", ink)
    return canvas.markup()
