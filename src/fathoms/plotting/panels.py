"""Panels of lines and maps of numbers, side by side in one figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fathoms.plotting.style import (
    BAND,
    DASHES,
    INK,
    MARKERS,
    PALETTE,
    PAPER,
    SOFT,
    colour_map,
    log_ticks,
    new_figure,
    printed,
    short_number,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

LONGEST = 44
"""Letters of a name in a legend or above a map; the rest is cut."""
MOST_MARKED = 12
"""Points of a line that is drawn with a mark on each."""


Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Line:
    """One line of a panel: its name in the legend, its points, colour and dashes by number, and a band."""

    name: str
    points: Points
    colour: int = 0
    dash: int = 0
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Args:
        title: What the vertical axis counts.
        x_label: What the horizontal axis counts.
        lines: The lines.
        log_y: Whether the vertical axis is logarithmic, which its title then says.
        log_x: Whether the horizontal one is.
        y_range: Ends of the vertical axis; None: those of the values.
        x_ticks: Ticks of the horizontal axis; None: chosen.
        notes: Lines of text in the panel.
        limit: A height to be marked and what it means, such as (0.1, "saturated below").
    """

    title: str
    x_label: str
    lines: list[Line]
    log_y: bool = False
    log_x: bool = False
    y_range: tuple[float, float] | None = None
    x_ticks: Sequence[float] | None = None
    notes: list[str] = field(default_factory=list)
    limit: tuple[float, str] | None = None


@styled
def line_panels(
    panels: Sequence[Panel], title: str, columns: int = 2, size: tuple[float, float] = (370, 235)
) -> Figure:
    """Panels of a size side by side under one title, above one legend."""
    rows = math.ceil(len(panels) / columns)
    names = {line.name: line for panel in panels for line in panel.lines if line.name}
    width = columns * size[0]
    across = _legend_columns(list(names), width)
    legend_rows = -(-len(names) // across) if len(names) > 1 else 0
    figure = new_figure(width, rows * size[1] + 26 * bool(title) + 19 * legend_rows, title)
    for panel, axes in zip(panels, figure.subplots(rows, columns, squeeze=False).flat, strict=False):
        draw_panel(axes, panel)
    if legend_rows:
        handles = [_handle(line) for line in names.values()]
        figure.legend(handles=handles, loc="outside lower left", ncols=across)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    return figure


def _legend_columns(names: Sequence[str], width: float) -> int:
    """Columns of a legend: as many as its longest name has room for."""
    longest = min(max(map(len, names), default=1), LONGEST)
    return max(1, min(4, int(width // (7 * longest + 52))))


@styled
def point_panel(panel: Panel, size: tuple[float, float] = (370, 260)) -> Figure:
    """A panel of points that no line joins, above their legend."""
    across = _legend_columns([line.name for line in panel.lines], size[0])
    figure = new_figure(size[0], size[1] + 19 * -(-len(panel.lines) // across))
    axes = figure.subplots()
    axes.set_title(printed(panel.title))
    axes.set_xlabel(panel.x_label, loc="right")
    for line in panel.lines:
        look = {"color": PALETTE[line.colour % len(PALETTE)], "marker": MARKERS[line.dash % len(MARKERS)]}
        xs, ys = zip(*line.points, strict=True)
        axes.scatter(
            xs,
            ys,
            s=36,
            alpha=0.8,
            edgecolors=PAPER,
            linewidths=0.8,
            label=shortened(line.name, LONGEST),
            **look,
        )
    if any(line.name for line in panel.lines):
        figure.legend(loc="outside lower left", ncols=across)
    return figure


class Interval(NamedTuple):
    """One row: its name, its colour by number, its mean, interval and points, and the numbers beside it.

    A colour of None is the text's, one of -1 that of text beside it.
    """

    name: str
    colour: int | None
    mean: float | None
    side: tuple[float, float] | None
    points: Sequence[float]
    text: str
    remark: str


@styled
def interval_rows(
    rows: Sequence[Interval],
    title: str,
    note: str = "",
    *,
    band: tuple[float, float] | None = None,
    narrow: bool = False,
) -> Figure:
    """Means with their intervals and points, a row each, with its name to the left and its numbers to the right.

    Args:
        rows: The rows, from the top.
        title: Above them.
        note: Below them.
        band: A range around zero that is shaded; zero is then marked.
        narrow: Whether names and numbers stand above each row, as a phone has room for.
    """
    height = (64.0 if narrow else 27.0) * len(rows)
    figure = new_figure(360 if narrow else 980, height + 90, title)
    axes = figure.subplots()
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(rows) - 0.5, -0.7 if narrow else -0.5)
    if band is not None:
        axes.axvspan(*band, color=BAND, zorder=0)
        axes.axvline(0, color=SOFT, linewidth=1)
    for place, row in enumerate(rows):
        look = INK if row.colour is None else SOFT if row.colour < 0 else PALETTE[row.colour % len(PALETTE)]
        if row.side is not None:
            axes.plot(row.side, (place, place), color=look, linewidth=3, alpha=0.55, solid_capstyle="round")
        if row.points:
            mark = MARKERS[(row.colour or 0) // len(PALETTE) % len(MARKERS)]
            axes.scatter(row.points, [place] * len(row.points), s=36, marker=mark, color=look, alpha=0.75)
        if row.mean is not None:
            reach = 0.14 if narrow else 0.3
            axes.plot((row.mean, row.mean), (place - reach, place + reach), color=look, linewidth=2.4)
    axes.set_xlabel(note, loc="left")
    if narrow:
        axes.set_yticks([])
        for place, row in enumerate(rows):
            below = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 10}
            axes.text(0, place - 0.45, shortened(row.name, 52), **below)
            axes.text(0, place - 0.24, shortened(f"{row.text}  {row.remark}", 58), color=SOFT, **below)
        return figure
    axes.set_yticks(range(len(rows)), [shortened(row.name, 46) for row in rows])
    axes.tick_params(axis="y", labelcolor=INK)
    widest = max((len(row.text) for row in rows), default=0)
    for place, row in enumerate(rows):
        at = {"xy": (1, place), "xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
        look = {"va": "center", "fontsize": 10, "annotation_clip": False}
        axes.annotate(row.text, xytext=(10, 0), color=INK, **at, **look)
        remark = shortened(row.remark, 84 - widest)
        axes.annotate(remark, xytext=(18 + 5.6 * widest, 0), color=SOFT, **at, **look)
    return figure


def shortened(text: str, most: int) -> str:
    """A text without control characters, of at most `most` letters."""
    text = printed(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _handle(line: Line) -> Any:
    from matplotlib.lines import Line2D

    style = DASHES[line.dash % len(DASHES)]
    return Line2D(
        [],
        [],
        color=PALETTE[line.colour % len(PALETTE)],
        linestyle=style,
        label=shortened(line.name, LONGEST),
    )


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Lines, which are broken where there is no value that the axis can show, with marks where there are few."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(printed(panel.title) + (", log scale" if panel.log_y else ""))
    axes.set_xlabel(panel.x_label, loc="right")
    points = [point for line in panel.lines for point in line.points]
    seen = [(x, y) for x, y in points if y is not None and _shows(y, panel.log_y)]
    if not seen:
        axes.set_axis_off()
        axes.text(0.05, 0.5, "nothing to show: no value above zero", color=SOFT, transform=axes.transAxes)
        return
    for line in panel.lines:
        xs = [x for x, _ in line.points]
        ys = [y if _shows(y, panel.log_y) else math.nan for _, y in line.points]
        style = {"color": PALETTE[line.colour % len(PALETTE)], "linestyle": DASHES[line.dash % len(DASHES)]}
        if line.band is not None:
            axes.fill_between(xs, *line.band, color=style["color"], alpha=0.16, linewidth=0)
        marker = "o" if len(xs) <= MOST_MARKED else ""
        axes.plot(np.array(xs), np.array(ys, float), marker=marker, markersize=4, **style)
    if panel.log_y:
        axes.set_yscale("log")
        low, high = min(y for _, y in seen), max(y for _, y in seen)
        if high < 2 * low:
            # What hardly changes must not look as if it did.
            axes.set_ylim((low * high / 2) ** 0.5, (low * high * 2) ** 0.5)
        log_ticks(axes.yaxis, low, high)
    if panel.log_x:
        axes.set_xscale("log")
        log_ticks(axes.xaxis, min(x for x, _ in seen), max(x for x, _ in seen))
    else:
        # There is no half of a block or of an epoch.
        whole = all(float(x).is_integer() for x, _ in seen)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole))
    if panel.x_ticks is not None:
        axes.set_xticks(panel.x_ticks, [short_number(x) for x in panel.x_ticks])
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    _annotate(axes, panel)


def _annotate(axes: Axes, panel: Panel) -> None:
    """The notes of a panel and its limit."""
    for row, note in enumerate(panel.notes):
        axes.text(0.03, 0.95 - 0.09 * row, printed(note), fontsize=10, va="top", transform=axes.transAxes)
    if panel.limit is not None:
        height, words = panel.limit
        low, high = axes.get_ylim()
        if low <= height <= high:
            axes.axhline(height, color=SOFT, linewidth=1, linestyle=(0, (1, 2)))
            place = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
            axes.text(1, height, words, color=SOFT, fontsize=9, **place)


def _shows(y: float | None, log: bool) -> bool:
    return y is not None and math.isfinite(y) and (y > 0 or not log)


@dataclass(frozen=True)
class NumberMap:
    """One map of numbers: rows from the top, columns from the left.

    Args:
        title: Above it.
        values: The numbers.
        rows: Names of the rows; as many are written as there is room for.
        columns: Names of the columns.
        note: Below it.
    """

    title: str
    values: np.ndarray
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    note: str = ""


@styled
def map_grid(
    maps: Sequence[NumberMap],
    title: str,
    columns: int,
    *,
    size: tuple[float, float] = (170.0, 150.0),
    log: bool = False,
    labels: tuple[str, str] = ("", ""),
    write: Callable[[float], str] | None = None,
) -> Figure:
    """Maps side by side on one colour scale, with its bar beside them.

    Args:
        maps: The maps.
        title: Above them.
        columns: Maps of a row.
        size: Width and height of a map in points, its texts included.
        log: Whether colours follow the logarithm; numbers that have none are grey.
        labels: What columns and rows are.
        write: The text of a number, to be written on its square.
    """
    from matplotlib.colors import LogNorm, Normalize

    columns = min(columns, len(maps))
    lines = -(-len(maps) // columns)
    figure = new_figure(columns * size[0] + 70, lines * size[1] + 34 * bool(title), title)
    values = [np.where(one.values > 0, one.values, np.nan) if log else one.values for one in maps]
    known = np.concatenate([found[np.isfinite(found)] for found in values])
    low, high = (float(known.min()), float(known.max())) if known.size else (0.1, 1.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    norm = LogNorm(low, high) if log else Normalize(low, high)
    every = figure.subplots(lines, columns, squeeze=False)
    for place, (one, found, axes) in enumerate(zip(maps, values, every.flat, strict=False)):
        image = axes.imshow(np.ma.masked_invalid(found), cmap=colour_map(), norm=norm)
        axes.set_title(shortened(one.title, LONGEST), fontsize=11)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        _names(axes.yaxis, one.rows, int(size[1] // 18))
        _names(axes.xaxis, one.columns, int(size[0] // 45))
        if write is not None:
            for row, column in zip(*np.nonzero(np.isfinite(found)), strict=True):
                dark = norm(found[row, column]) < 0.45
                look = {"color": "#fefefe" if dark else "#15181b", "ha": "center", "va": "center"}
                axes.text(column, row, write(found[row, column]), **look)
        axes.set_xlabel(one.note or (labels[0] if place // columns == lines - 1 else ""))
        axes.set_ylabel(labels[1] if place % columns == 0 else "")
    for axes in every.flat[len(maps) :]:
        axes.remove()
    bar = figure.colorbar(image, ax=figure.axes, fraction=0.05, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    if log:
        log_ticks(bar.ax.yaxis, low, high)
    return figure


def _names(axis: Axis, names: Sequence[str], most: int) -> None:
    """As many names as there is room for, evenly."""
    chosen = range(0, len(names), max(1, -(-len(names) // max(most, 1))))
    axis.set_ticks(list(chosen), [printed(names[place]) for place in chosen])
