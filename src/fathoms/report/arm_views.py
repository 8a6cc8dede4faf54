"""Arms of a comparison as its page shows them: scores over seeds, what became of each run, trials, and curves."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fathoms.comparing.plan import JOINT
from fathoms.comparing.statistics import mean_interval, rounding_variance, sd_over_seeds
from fathoms.plotting.style import MARKERS, PALETTE
from fathoms.report.records import (
    CellRecord,
    ComparisonRecord,
    clipped,
    count,
    duration,
    file_size,
    listed,
    number,
    score,
    shown,
    table,
)


@dataclass(frozen=True)
class ArmView:
    """One variant and its cells.

    Args:
        name: Its name in the files.
        label: Its name as it is shown; no two arms share one.
        index: Its place in the plan, which decides its colour.
        options: Its settings.
        cells: Its runs.
        metric: top1, loss or seconds.
        diverged: Wilson's interval of the share of its runs that diverge, and its mean with them at chance; None
            where none did.
        rounding: Least variance over seeds, that of the score's rounding.
    """

    name: str
    label: str
    index: int
    options: dict[str, str]
    cells: list[CellRecord]
    metric: str
    diverged: tuple[float, float, float] | None = None
    rounding: float = 0.0

    @property
    def style(self) -> str:
        """The classes of its colour and its mark."""
        return f"c{self.index % len(PALETTE)} m{self.index // len(PALETTE) % len(MARKERS)}"

    @property
    def scores(self) -> list[float]:
        return [value for cell in self.cells if (value := cell.score(self.metric)) is not None]

    @property
    def mean(self) -> float | None:
        return sum(self.scores) / len(self.scores) if self.scores else None

    @property
    def sd(self) -> float | None:
        return sd_over_seeds(self.scores)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean; None below three seeds."""
        return mean_interval(self.scores, least=self.rounding)

    def having(self, status: str) -> int:
        return sum(cell.status == status for cell in self.cells)

    def average(self, field: str) -> float | None:
        """Mean of seconds, memory or speed over its ended runs."""
        values = [getattr(cell, field) for cell in self.cells if cell.status in ("done", "stalled")]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None


def arms_of(comparison: ComparisonRecord) -> list[ArmView]:
    """The arms in the order of the plan, then of the cells."""
    planned = table(comparison.plan.get("arms")) if comparison.results else {}
    names = list(dict.fromkeys([*map(str, planned), *(cell.arm for cell in comparison.cells)]))
    options = [{str(k): str(v) for k, v in table(planned.get(name)).items()} for name in names]
    labels = unique([clipped(name) for name in short_names(names, options)])
    judged = {
        str(row.get("name")): row for row in map(table, listed(comparison.results.get("arms"))) if table(row)
    }
    images = number(comparison.plan.get("images"), 0)
    least = rounding_variance(int(images)) if comparison.metric == "top1" and images >= 1 else 0.0
    made = []
    for index, (name, label) in enumerate(zip(names, labels, strict=True)):
        cells = [cell for cell in comparison.cells if cell.arm == name]
        own = cells[0].options if cells else options[index]
        lost = _diverged(judged.get(name, {}))
        made.append(ArmView(name, label, index, own, cells, comparison.metric, lost, least))
    return made


def _diverged(row: dict[str, Any]) -> tuple[float, float, float] | None:
    """The interval and the mean of an arm with diverged runs, as results.json has them."""
    values = [*listed(row.get("diverged_interval"))[:2], row.get("mean_with_diverged")]
    found = [value for one in values if (value := number(one)) is not None]
    return (found[0], found[1], found[2]) if number(row.get("diverged"), 0) and len(found) == 3 else None


def short_names(names: Sequence[str], options: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of arms without the words that they share: the name of an option before a word, parts that all have.

    >>> short_names(["norm=ln, depth=12", "norm=dyt, depth=24"], [{"norm": "ln", "depth": "12"}, {}])
    ['ln, depth 12', 'dyt, depth 24']
    """
    parts = [name.split(JOINT) for name in names]
    keys = [[part.partition("=")[0] for part in own] for own in parts]
    if not names or not set(keys[0]) <= set(options[0]) or any(own != keys[0] for own in keys):
        return list(names)
    varied = [place for place in range(len(keys[0])) if len({own[place] for own in parts}) > 1]
    short = [JOINT.join(_short_part(own[place]) for place in varied) for own in parts]
    return short if len(set(short)) == len(names) else list(names)


def _short_part(part: str) -> str:
    key, _, value = part.partition("=")
    return value if value[:1].isalpha() and value not in ("True", "False", "none") else f"{key} {value}"


def unique(labels: Sequence[str]) -> list[str]:
    """The labels, those that occur again with a number.

    >>> unique(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    seen: dict[str, int] = {}
    made = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        made.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return made


def leading(arms: Sequence[ArmView], comparison: ComparisonRecord) -> ArmView | None:
    """The arm with the best mean, diverged runs counted at chance as in the verdict; None before a score."""
    kept = {
        str(row.get("name")): number(row.get("mean_with_diverged"))
        for row in map(table, listed(comparison.results.get("arms")))
    }
    sign = 1 if comparison.metric == "top1" else -1
    scored = []
    for arm in arms:
        judged = kept.get(arm.name)
        if (mean := arm.mean) is not None:
            scored.append((mean if judged is None else judged, arm))
    return max(scored, key=lambda pair: sign * pair[0])[1] if scored else None


def best_first(arms: Sequence[ArmView]) -> list[ArmView]:
    """Best mean first, arms without a score last."""

    def rank(arm: ArmView) -> tuple[bool, float]:
        mean = arm.mean
        return mean is None, 0.0 if mean is None else -mean if arm.metric == "top1" else mean

    return sorted(arms, key=rank)


Trials = dict[float, list[float]]


def tuning_remarks(arms: Sequence[ArmView], tuning: dict[str, Any]) -> list[str]:
    """A remark for each best value at the edge of the grid, and for trials that diverged or failed."""
    found, remarks = tuned_arms(tuning), []
    for arm in arms:
        own = found.get(arm.name, {})
        if lost := diverged(own):
            remarks.append(f"{arm.label}: diverged at {lost}")
        for option in map(str, listed(own.get("edge"))):
            best = clipped(shown(table(own.get("best")).get(option, "?")), 40)
            remarks.append(
                f"{arm.label}: the best {clipped(option, 40)}, {best}, is at the edge of the grid; "
                "a wider one may do better"
            )
        for choice in map(table, listed(own.get("failed"))):
            tried = clipped(", ".join(f"{name}={shown(value)}" for name, value in choice.items()), 80)
            remarks.append(f"{arm.label}: the trial of {tried} failed, so the best was chosen without it")
    return remarks


def diverged(own: dict[str, Any]) -> str:
    """The values at which an arm's trials diverged, as text; empty where none did.

    >>> diverged({"trials": [{"choice": {"lr": "4e-3"}, "status": "diverged"}, {"choice": {"lr": "1e-3"}}]})
    'lr 4e-3'
    """
    lost = [
        ", ".join(f"{name} {shown(value)}" for name, value in table(trial.get("choice")).items())
        for trial in map(table, listed(own.get("trials")))
        if trial.get("status") == "diverged"
    ]
    return clipped(" and ".join(lost), 80)


def tuned_arms(tuning: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The entry of each arm in tuning.json, by its name: `best`, its values by option, and `trials`."""
    return {str(own.get("name")): own for own in map(table, listed(tuning.get("arms")))}


def trials_of(own: dict[str, Any], metric: str, option: str) -> Trials:
    """Scores by tuned value."""
    found: Trials = {}
    for trial in map(table, listed(own.get("trials"))):
        value, reached = tuned_value(table(trial.get("choice")).get(option)), number(trial.get(metric))
        if value is not None and reached is not None:
            found.setdefault(value, []).append(reached)
    return found


def tuned_value(value: Any) -> float | None:
    """A tuned value, which may be written as text, if it has a logarithm."""
    try:
        found = number(float(value)) if isinstance(value, str) else number(value)
    except ValueError:
        return None
    return found if found is not None and found > 0 else None


CURVES = (
    ("val", "top1", "Accuracy on val", "%"),
    ("val", "loss", "Loss on val", ""),
    ("train", "loss", "Loss in training", ""),
    ("train", "top1", "Accuracy in training", "%"),
)
MOST_EPOCHS = 500
"""Epochs that are drawn; more are subsampled evenly."""


def page_data(arms: Sequence[ArmView]) -> dict[str, Any]:
    """The data of the curves, for the page's script."""
    return {
        "arms": [
            {"name": arm.label, "colour": arm.index % len(PALETTE), "dash": arm.index // len(PALETTE)}
            for arm in arms
        ],
        "order": [arm.index for arm in best_first(arms)],
        "curves": curves(arms),
    }


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


def _percent(value: float | None) -> tuple[str, float | None]:
    return "–" if value is None else f"{value:.2f}", value


def _mean_on(arm: ArmView, name: str) -> float | None:
    """Mean accuracy on a further image set, of the runs that were measured on it."""
    known = [value for cell in arm.cells if (value := cell.robustness.get(name)) is not None]
    return sum(known) / len(known) if known else None


def arm_row(arm: ArmView, sets: Sequence[str]) -> tuple[ArmView, list[tuple[str, float | None]]]:
    """The row of an arm: texts with the numbers they sort by."""
    low, high = arm.interval or (None, None)
    span = "–" if low is None or high is None else f"{score(low, arm.metric)} to {score(high, arm.metric)}"
    lost = arm.having("diverged") + arm.having("failed")
    words = [f"{arm.having(word)} {word}" for word in ("diverged", "failed", "stalled") if arm.having(word)]
    if arm.diverged is not None and arm.having("diverged"):
        least, most, mean = arm.diverged
        words[0] += f" ({least:.0%} to {most:.0%}; {score(mean, arm.metric)} with them at chance)"
    seconds, memory, speed = (arm.average(field) for field in ("seconds", "memory", "speed"))
    return arm, [
        (str(len(arm.scores)), float(len(arm.scores))),
        (score(arm.mean, arm.metric), arm.mean),
        *(_percent(_mean_on(arm, name)) for name in sets),
        (score(arm.sd, arm.metric), arm.sd),
        (span, low),
        (", ".join(words) or "–", float(lost)),
        ("–" if seconds is None else duration(seconds), seconds),
        ("–" if memory is None else file_size(memory), memory),
        ("–" if speed is None else f"{speed:,.0f}", speed),
    ]


def cell_row(
    arm: ArmView, cell: CellRecord, sets: Sequence[str]
) -> tuple[ArmView, CellRecord, list[tuple[str, float | None]]]:
    """The row of a cell: texts with the numbers they sort by."""
    parameters = number(cell.record.summary.get("parameters"))
    return (
        arm,
        cell,
        [
            _percent(cell.top1),
            *(_percent(cell.robustness.get(name)) for name in sets),
            ("–" if cell.loss is None else f"{cell.loss:.4f}", cell.loss),
            (str(cell.epoch), float(cell.epoch)),
            ("–" if parameters is None else count(parameters), parameters),
            ("–" if cell.seconds is None else duration(cell.seconds), cell.seconds),
            ("–" if cell.memory is None else file_size(cell.memory), cell.memory),
            ("–" if cell.speed is None else f"{cell.speed:,.0f}", cell.speed),
        ],
    )
