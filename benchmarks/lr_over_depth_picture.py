"""The picture of lr_over_depth.py: loss against learning rate, a panel for each method, a curve for each depth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
WIDTH, HEIGHT, STEP, MARGIN = 300, 220, 50, 50
TOP, BOTTOM = 40, 205

Rows = Sequence[dict[str, Any]]


def as_picture(rows: Rows) -> str:
    """The picture as SVG; losses above the panel, those of a guess, are at its top."""
    methods = list(dict.fromkeys(row["residual"] for row in rows))
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    losses = [statistics.fmean(row["loss"].values()) for row in rows if row["loss"]]
    span = (min(losses), min(max(losses), 2.4))
    parts = []
    for panel, method in enumerate(methods):
        left = MARGIN + panel * WIDTH
        parts.append(f'<text x="{left + 115}" y="20" text-anchor="middle">{method}</text>')
        parts.append(
            f'<rect x="{left}" y="30" width="230" height="{HEIGHT - 40}" fill="none" stroke="#999"/>'
        )
        for index, rate in enumerate(rates):
            x = left + 15 + STEP * index
            parts.append(f'<text x="{x}" y="{HEIGHT + 5}" text-anchor="middle">{rate:g}</text>')
        for colour, depth in zip(COLOURS, depths, strict=False):
            own = [row for row in rows if (row["residual"], row["depth"]) == (method, depth)]
            parts += _curve(own, colour, left, span)
    for index, (colour, depth) in enumerate(zip(COLOURS, depths, strict=False)):
        x = MARGIN + 10 + 90 * index
        parts.append(f'<text x="{x}" y="{HEIGHT + 30}" fill="{colour}">depth {depth}</text>')
    parts.append(f'<text x="8" y="{TOP}">{span[1]:.2f}</text><text x="8" y="{BOTTOM}">{span[0]:.2f}</text>')
    size = f'width="{MARGIN + WIDTH * len(methods)}" height="{HEIGHT + 40}"'
    style = 'font-family="sans-serif" font-size="11"'
    white = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{white}{"".join(parts)}</svg>\n'


def _curve(rows: Rows, colour: str, left: int, span: tuple[float, float]) -> list[str]:
    """A curve through the means with a dot for each seed, and a ring around its lowest point."""

    def height(loss: float) -> float:
        share = (min(loss, span[1]) - span[0]) / max(span[1] - span[0], 1e-9)
        return BOTTOM - (BOTTOM - TOP) * max(share, 0.0)

    points, dots = [], []
    for index, row in enumerate(rows):
        x, losses = left + 15 + STEP * index, list(row["loss"].values())
        dots += [f'<circle cx="{x}" cy="{height(loss):.1f}" r="1.5" fill="{colour}"/>' for loss in losses]
        if losses:
            points.append((x, height(statistics.fmean(losses))))
    if not points:
        return []
    x, y = max(points, key=lambda point: point[1])
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{colour}" stroke-width="2"/>'
    return [*dots, f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>', ring]
