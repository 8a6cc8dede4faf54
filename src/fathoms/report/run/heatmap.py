"""Heat maps of the norms of every block over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fathoms.drawing.colours import ramp_colour
from fathoms.report.quantities import clipped
from fathoms.report.run.files import number

COLUMNS = 60
"""Most columns; more measurements are subsampled evenly."""
WIDTH, LEFT, BOTTOM, TOP = 520, 92, 34, 6


@dataclass(frozen=True)
class Cell:
    """One measurement: position, colour (None: not a number) and tooltip."""

    x: float
    y: float
    colour: str | None
    text: str


@dataclass(frozen=True)
class HeatMap:
    """A heat map ready to be drawn."""

    title: str
    cells: list[Cell]
    width: float
    height: float
    total_height: float
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    low: str
    high: str


def draw(title: str, field: str, probes: list[dict[str, Any]]) -> HeatMap | None:
    """Heat map of one number of every site over the updates; colours follow its logarithm."""
    rows = [row for row in probes if isinstance(row.get("sites"), list) and row["sites"]]
    if not rows:
        return None
    if len(rows) > COLUMNS:
        rows = [rows[round(i * (len(rows) - 1) / (COLUMNS - 1))] for i in range(COLUMNS)]
    table = [[_site(site, field) for site in row["sites"]] for row in rows]
    names = [name for name, _ in table[0]]
    found = [value for line in table for _, value in line if value]
    if not found:
        return None
    low, high = math.log(min(found)), math.log(max(found))
    width = (WIDTH - LEFT) / len(table)
    # A row is as high as its label, which is read on a phone too.
    height = 17.0
    cells = []
    for column, (row, line) in enumerate(zip(rows, table, strict=True)):
        for place, (name, value) in enumerate(line[: len(names)]):
            shade = ramp_colour((math.log(value) - low) / ((high - low) or 1)) if value else None
            shown = "not a finite number above zero" if value is None else f"{value:.4g}"
            text = f"{name}, update {number(row.get('step'), 0):g}: {shown}"
            cells.append(Cell(round(LEFT + column * width, 2), round(TOP + place * height, 2), shade, text))
    labels = [(round(TOP + (i + 0.5) * height, 2), name) for i, name in enumerate(names)]
    jump = max(1, math.ceil(len(rows) / 6))
    updates = [
        (round(LEFT + (i + 0.5) * width, 2), f"{number(row.get('step'), 0):g}")
        for i, row in enumerate(rows)
        if i % jump == 0
    ]
    total = TOP + height * len(names) + BOTTOM
    return HeatMap(
        title, cells, width, height, total, labels, updates, f"{math.exp(low):.3g}", f"{math.exp(high):.3g}"
    )


def _site(site: Any, field: str) -> tuple[str, float | None]:
    """Name and number of a site; None unless it is above zero."""
    if not isinstance(site, dict):
        return "?", None
    value = number(site.get(field))
    return site_name(site), value if value is not None and value > 0 else None


def site_name(site: dict[str, Any]) -> str:
    """Block and branch of a site."""
    block = str(site.get("block", "?")).removeprefix("blocks.")
    return f"{clipped(block, 24)} {clipped(str(site.get('branch', '?')), 12)}"
