"""The picture of lr_over_depth.py: loss against learning rate, a panel for each method, a curve for each depth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fathoms.drawing.picture import Picture
from fathoms.probes.pictures.plot import Panel, Series, grid_of

HIGHEST = 2.4
"""Losses above, those of a guess, are drawn at the top."""

Rows = Sequence[dict[str, Any]]


def as_picture(rows: Rows) -> Picture:
    """Means over seeds, on the same axes in every panel."""
    methods = list(dict.fromkeys(row["residual"] for row in rows))
    losses = [_mean(row) for row in rows if row["loss"]]
    span = (min(losses) - 0.02, min(max(losses), HIGHEST) + 0.02)
    panels = [_panel([row for row in rows if row["residual"] == method], method, span) for method in methods]
    return grid_of(panels, "Test loss against learning rate, by depth", columns=len(panels), size=(330, 270))


def _panel(rows: Rows, method: str, span: tuple[float, float]) -> Panel:
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    curves = [
        Series(
            f"depth {depth}",
            [(row["lr"], _mean(row) if row["loss"] else None) for row in rows if row["depth"] == depth],
            colour,
        )
        for colour, depth in enumerate(depths)
    ]
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    return Panel(f"residual={method}", "learning rate", curves, log_x=True, y_range=span, x_ticks=rates)


def _mean(row: dict[str, Any]) -> float:
    return statistics.fmean(row["loss"].values())
