"""Maps of numbers as coloured squares, each with its scale, in a row under one title."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fathoms.drawing.colours import SOFT, ramp_pixels
from fathoms.drawing.picture import Picture
from fathoms.drawing.shapes import Point
from fathoms.drawing.ticks import short_number

GAP, HEAD, FOOT = 24.0, 40.0, 40.0


@dataclass(frozen=True)
class HeatMap:
    """One map: rows from the top, columns from the left.

    Args:
        title: Above it.
        values: The numbers.
        size: Width and height in points.
        limits: Lowest and highest number of the scale; None takes those of the values.
        notes: Lines below it.
        rows: Texts to the left of the first and the last row.
    """

    title: str
    values: np.ndarray
    size: Point = (150.0, 150.0)
    limits: tuple[float, float] | None = None
    notes: list[str] = field(default_factory=list)
    rows: tuple[str, str] | None = None


def row_of(maps: Sequence[HeatMap], title: str, note: str = "", columns: int | None = None) -> Picture:
    """Maps side by side, in as many lines as `columns` asks for."""
    columns = columns or len(maps)
    lines = [maps[start : start + columns] for start in range(0, len(maps), columns)]
    heights = [
        HEAD + max(m.size[1] for m in line) + FOOT + 14 * max(len(m.notes) for m in line) for line in lines
    ]
    width = GAP + max(sum(_slot(m) for m in line) for line in lines)
    wide = max(width, 8.0 * len(title) + 2 * GAP, 6.0 * len(note) + 2 * GAP)
    picture = Picture(wide, sum(heights) + (48 if note else 30), title)
    picture.text((GAP, 24), title, size=14, bold=True)
    if note:
        picture.text((GAP, 42), note, colour=SOFT)
    y = 44.0 if note else 26.0
    for line, height in zip(lines, heights, strict=True):
        x = GAP
        for heat in line:
            _draw(picture, heat, (x + _margin(heat), y + HEAD - 12))
            x += _slot(heat)
        y += height
    return picture


def _margin(heat: HeatMap) -> float:
    return 0.0 if heat.rows is None else 46.0


def _slot(heat: HeatMap) -> float:
    """The width that a map takes with its texts."""
    texts = [6.4 * len(heat.title), *(5.4 * len(note) for note in heat.notes)]
    return _margin(heat) + max(heat.size[0], *texts) + GAP


def _draw(picture: Picture, heat: HeatMap, at: Point) -> None:
    known = heat.values[np.isfinite(heat.values)]
    low, high = heat.limits or ((float(known.min()), float(known.max())) if known.size else (0.0, 1.0))
    x, y = at
    picture.text((x, y - 6), heat.title, size=11, bold=True)
    picture.pixels(at, heat.size, ramp_pixels(heat.values, low, high))
    below = y + heat.size[1]
    scale = np.linspace(low, high, 32)[None]
    picture.pixels((x, below + 6), (heat.size[0], 7), ramp_pixels(scale, low, high))
    picture.text((x, below + 25), short_number(low), size=10, colour=SOFT)
    picture.text((x + heat.size[0], below + 25), short_number(high), size=10, anchor="end", colour=SOFT)
    for row, words in enumerate(heat.notes):
        picture.text((x, below + 40 + 14 * row), words, size=10)
    if heat.rows is not None:
        picture.text((x - 6, y + 9), heat.rows[0], size=10, anchor="end", colour=SOFT)
        picture.text((x - 6, below - 2), heat.rows[1], size=10, anchor="end", colour=SOFT)
