"""Quantities and settings as text: counts, times, sizes, scores."""

from __future__ import annotations

from typing import Any

LONGEST = 160
"""Characters of a name that are shown; the rest is cut."""


def shown(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(shown(inner) for inner in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def count(value: int | float) -> str:
    """A count in thousands or millions."""
    scale, unit = next(((s, u) for s, u in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if value >= s), (1.0, ""))
    return f"{value / scale:.3g}{unit}" if scale > 1 else f"{value:g}"


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def file_size(size: int | float) -> str:
    """A size in B, kB, MB or GB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def clipped(text: str, most: int = LONGEST) -> str:
    """A text of at most `most` characters.

    >>> clipped("learnable_scaler", 6)
    'learn…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def score(value: float | None, metric: str) -> str:
    """A score of results.json: accuracy in percent or a loss."""
    return "–" if value is None else f"{value:.2f}" if metric == "top1" else f"{value:.4f}"
