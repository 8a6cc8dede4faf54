"""Signal and gradient by depth: six panels of one model, or of several together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fathoms.drawing.picture import Picture
from fathoms.probes.blocks import main_stack
from fathoms.probes.pictures.plot import Panel, Series, grid_of

Sites = Sequence[dict[str, Any]]

# Column, title, whether the axis is logarithmic.
_PANELS = (
    ("stream", "Stream (RMS)", True),
    ("ratio", "Branch over stream", True),
    ("gradient_rms", "Gradient on the stream (RMS)", True),
    ("weights_rms", "Gradient of the weights (RMS)", True),
    ("entropy", "Attention entropy over its maximum", False),
    ("token_cosine", "Cosine between tokens", False),
)


def depth_profile(models: Mapping[str, Sites], title: str = "Signal and gradient by depth") -> Picture:
    """Six numbers against the block, for each named model; attention and MLP apart where there is one model."""
    panels = []
    for column, name, log in _PANELS:
        lines: list[Series] = []
        for index, (label, sites) in enumerate(models.items()):
            lines += _lines(label, index, sites, column, alone=len(models) == 1)
        panels.append(Panel(name, "block", lines, log_y=log, y_range=None if log else _unit(lines)))
    picture = grid_of(panels, title)
    columns = [column for column, _, _ in _PANELS]
    picture.data = {
        label: [{key: site.get(key) for key in ("block", "branch", *columns)} for site in sites]
        for label, sites in models.items()
    }
    return picture


def _lines(label: str, index: int, sites: Sites, column: str, alone: bool) -> list[Series]:
    places = {name: place for place, name in enumerate(dict.fromkeys(site["block"] for site in sites))}
    if not alone:
        last = {s["block"]: s.get(column) for s in sites if s.get(column) is not None}
        return [Series(label, _broken(last, places), index, index >= 7)]
    branches = list(dict.fromkeys(site["branch"] for site in sites))
    lines = []
    for branch in branches:
        values = {s["block"]: s.get(column) for s in sites if s["branch"] == branch}
        if any(value is not None for value in values.values()):
            lines.append(Series(branch, _broken(values, places), branches.index(branch), branch != "attn"))
    return lines


def _broken(values: dict[str, float | None], places: dict[str, int]) -> list[tuple[float, float | None]]:
    """Points by block; a line ends where another stack of blocks begins, such as class attention."""
    stack = main_stack(list(places))
    points: list[tuple[float, float | None]] = []
    before = None
    for block, value in values.items():
        if before is not None and (before in stack) != (block in stack):
            points.append((places[block], None))
        points.append((places[block], value))
        before = block
    return points


def _unit(lines: Sequence[Series]) -> tuple[float, float]:
    """From zero to one, and below zero where a cosine is."""
    low = min((y for line in lines for _, y in line.points if y is not None), default=0.0)
    return (-1.0 if low < 0 else 0.0, 1.0)
