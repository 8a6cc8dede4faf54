"""Series of a comparison as compact arrays, which the page's script draws: curves by epoch, norms by depth and time."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from fathoms.drawing.colours import PALETTE, RAMP
from fathoms.errors import ConfigError
from fathoms.files.jsonl import Row, read_lines
from fathoms.report.comparison.arms import ArmView
from fathoms.report.comparison.files import CellRecord
from fathoms.report.quantities import clipped
from fathoms.report.run.files import number, table
from fathoms.report.run.heatmap import site_name

CURVES = (
    ("val", "top1", "Accuracy on val", "%"),
    ("val", "loss", "Loss on val", ""),
    ("train", "loss", "Loss in training", ""),
    ("train", "top1", "Accuracy in training", "%"),
)
MOST_EPOCHS = 500
"""Epochs that are drawn; more are subsampled evenly."""
FIELDS = (
    ("gradient", "Gradient on the stream"),
    ("stream", "Activations of the stream"),
    ("ratio", "Branch over stream"),
    ("weights", "Gradient of the weights"),
)
COLUMNS = 48
MAP_ARMS = 40
"""Arms whose norms are shown; a page holds 15 MB."""


def page_data(arms: Sequence[ArmView]) -> dict[str, Any]:
    """The data of the curves, for the page's script."""
    return {
        "arms": [
            {"name": arm.label, "colour": arm.index % len(PALETTE), "dash": arm.index // len(PALETTE)}
            for arm in arms
        ],
        "order": [arm.index for arm in best_first(arms)],
        "curves": curves(arms),
        "depth": depth_maps(arms),
    }


def best_first(arms: Sequence[ArmView]) -> list[ArmView]:
    """Best mean first, arms without a score last."""

    def rank(arm: ArmView) -> tuple[bool, float]:
        mean = arm.mean
        return mean is None, 0.0 if mean is None else mean if arm.metric == "loss" else -mean

    return sorted(arms, key=rank)


def epoch_grid(arms: Sequence[ArmView]) -> np.ndarray:
    """The epochs that are drawn."""
    last = min(max((cell.epoch for arm in arms for cell in arm.cells), default=0), 1_000_000)
    if last > MOST_EPOCHS:
        return np.unique(np.linspace(1, last, MOST_EPOCHS).round().astype(int))
    return np.arange(1, last + 1)


def arm_lines(arm: ArmView, split: str, field: str, grid: np.ndarray) -> list[np.ndarray]:
    """One metric of each run of an arm that measured it, on a grid of epochs."""
    lines = [line for cell in arm.cells if (line := _on_grid(cell, split, field, grid)) is not None]
    finite = [np.where(np.isfinite(line), line, np.nan) for line in lines]
    return [line for line in finite if not np.isnan(line).all()]


def curves(arms: Sequence[ArmView]) -> dict[str, Any]:
    """Every metric of every cell on one grid of epochs, NaN where it was not measured."""
    cells = [(arm, cell) for arm in arms for cell in arm.cells]
    grid = epoch_grid(arms)
    made = []
    for split, field, title, unit in CURVES:
        lines = [_on_grid(cell, split, field, grid) for _, cell in cells]
        if any(line is not None for line in lines):
            made.append(
                {
                    "title": title,
                    "unit": unit,
                    "lines": [None if line is None else packed(line) for line in lines],
                }
            )
    return {
        "epochs": grid.tolist(),
        "cells": [[arm.index, clipped(cell.seed, 20)] for arm, cell in cells],
        "charts": made,
    }


def _on_grid(cell: CellRecord, split: str, field: str, grid: np.ndarray) -> np.ndarray | None:
    values = {int(epoch): value for epoch, value in cell.record.series(split, field) if value is not None}
    if not values:
        return None
    return np.array([values.get(int(epoch), np.nan) for epoch in grid], np.float32)


def packed(values: Any) -> str:
    """Numbers as base64 of little-endian float32; one that float32 cannot hold is NaN."""
    wide = np.asarray(values, np.float64)
    narrow = np.where(np.abs(wide) < 3e38, wide, np.nan).astype("<f4")
    return base64.b64encode(narrow.tobytes()).decode()


def depth_maps(arms: Sequence[ArmView]) -> dict[str, Any]:
    """Norms of every branch over the updates, from the first run of each arm that was probed."""
    made = []
    for arm in arms:
        if len(made) == MAP_ARMS:
            break
        for cell in arm.cells:
            rows = _probes(cell)
            if rows:
                made.append(_depth_map(arm, cell, rows))
                break
    return {"fields": [list(pair) for pair in FIELDS], "ramp": RAMP, "maps": made}


def _probes(cell: CellRecord) -> list[Row]:
    """Measurements of a run; a damaged file gives none, its run is listed with the failures if it is worse."""
    if cell.record.folder is None:
        return []
    try:
        rows = read_lines(cell.record.folder / "probe.jsonl")
    except ConfigError:
        return []
    rows = [row for row in rows if isinstance(row.get("sites"), list) and row["sites"]]
    if len(rows) > COLUMNS:
        rows = [rows[round(i * (len(rows) - 1) / (COLUMNS - 1))] for i in range(COLUMNS)]
    return rows


def _depth_map(arm: ArmView, cell: CellRecord, rows: Sequence[Row]) -> dict[str, Any]:
    names = [site_name(table(site)) for site in rows[0]["sites"]]
    fields = {}
    for field, _ in FIELDS:
        values = np.full((len(names), len(rows)), np.nan)
        for column, row in enumerate(rows):
            for place, site in enumerate(row["sites"][: len(names)]):
                value = number(table(site).get(field))
                values[place, column] = value if value is not None and value > 0 else np.nan
        fields[field] = packed(values)
    updates = [number(row.get("step"), 0.0) for row in rows]
    return {
        "arm": arm.index,
        "seed": clipped(cell.seed, 20),
        "rows": names,
        "updates": updates,
        "fields": fields,
    }
