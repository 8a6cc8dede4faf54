"""Pictures over training, over sizes and over switches: trajectories, coordinate checks and sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fathoms.drawing.picture import Picture
from fathoms.probes.coordinates import Coordinates
from fathoms.probes.pictures.plot import Panel, Series, grid_of
from fathoms.probes.verdicts.start_features import depth_features

_WATCHED = (
    ("stream_max", "Largest stream (RMS)", True),
    ("ratio_median", "Branch over stream, median", True),
    ("gradient_factor", "Gradient factor per block", True),
    ("logit", "Largest attention logit", True),
    ("entropy_mean", "Attention entropy over its maximum", False),
    ("token_cosine", "Cosine between tokens, last block", False),
)


def trajectory_picture(rows: Sequence[dict[str, Any]]) -> Picture | None:
    """A run's probe.jsonl as six numbers over the updates; None with fewer than two measurements."""
    measured = [(row.get("step", 0), depth_features(row["sites"])) for row in rows if row.get("sites")]
    if len(measured) < 2:
        return None
    panels = [
        Panel(title, "update", [Series("", [(step, found[name]) for step, found in measured])], log_y=log)
        for name, title, log in _WATCHED
    ]
    picture = grid_of(panels, "Over training")
    picture.data = [{"step": step, **found} for step, found in measured]
    return picture


def coordinate_picture(check: Coordinates, size_name: str) -> Picture:
    """The rise of stream and logits against the size, a line per seed, and the level of the stream at each step."""
    panels = []
    for quantity, slope in (("stream", check.stream), ("logits", check.logits)):
        lines = [
            Series(
                f"seed {seed}",
                [(t.size, t.rise(quantity)) for t in check.trajectories if t.seed == seed],
                index,
                True,
            )
            for index, seed in enumerate(sorted({t.seed for t in check.trajectories}))
        ]
        note = f"slope {slope.value:+.2f} ({slope.low:+.2f} to {slope.high:+.2f}): {slope.verdict}"
        name = "Rise of mean |x_L|" if quantity == "stream" else "Rise of mean |logit|"
        panels.append(Panel(name, size_name, lines, True, True, x_ticks=check.sizes, notes=[note]))
    first = min(t.seed for t in check.trajectories)
    for name, quantity in (("Mean |x_L| at each step", "stream"), ("Loss at each step", "loss")):
        lines = [
            Series(f"{size_name} {t.size}", list(enumerate(getattr(t, quantity))), index + 1)
            for index, t in enumerate(t for t in check.trajectories if t.seed == first)
        ]
        panels.append(Panel(name, "step", lines, log_y=quantity == "stream"))
    picture = grid_of(panels, f"Coordinate check over {size_name}: {check.verdict}")
    picture.data = check.to_json()
    return picture


_SWEPT = (
    ("growth", "Stream, last over first"),
    ("gradient_ratio", "Gradient, first over last"),
    ("ratio_median", "Branch over stream, median"),
    ("weights_spread", "Gradient of the weights, largest over smallest"),
)


def sweep_picture(rows: Mapping[str, Mapping[int, Mapping[str, Any]]], axis: str) -> Picture:
    """Four numbers at initialisation against the depth, a line per value of the axis."""
    depths = sorted({depth for found in rows.values() for depth in found})
    panels = []
    for name, title in _SWEPT:
        lines = [
            Series(value, [(depth, found[depth].get(name)) for depth in sorted(found)], index)
            for index, (value, found) in enumerate(rows.items())
        ]
        panels.append(Panel(title, "depth", lines, True, True, x_ticks=depths))
    picture = grid_of(
        panels, f"At initialisation, by depth and {axis}" if axis else "At initialisation, by depth"
    )
    picture.data = {
        value: {str(depth): dict(found) for depth, found in by.items()} for value, by in rows.items()
    }
    return picture
