"""Arms of a comparison as its page shows them: scores over seeds, their interval, and what became of each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fathoms.compare.spread import mean_interval, rounding_variance, sd_over_seeds
from fathoms.drawing.colours import PALETTE
from fathoms.report.comparison.files import CellRecord, ComparisonRecord
from fathoms.report.quantities import clipped
from fathoms.report.run.files import listed, number, table

MARKS = 3
"""Marks and dashes; arms beyond the palette take its colours again with the next one."""


@dataclass(frozen=True)
class ArmView:
    """One variant and its cells.

    Args:
        name: Its name in the files.
        label: Its name as it is shown; no two arms share one.
        index: Its place in the plan, which decides its colour.
        options: Its settings.
        cells: Its runs.
        metric: top1 or loss.
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
        return f"c{self.index % len(PALETTE)} m{self.index // len(PALETTE) % MARKS}"

    @property
    def scores(self) -> list[float]:
        """Scores of the runs that ended with one."""
        return [value for cell in self.cells if (value := cell.score(self.metric)) is not None]

    @property
    def mean(self) -> float | None:
        """Mean over the runs that did not diverge."""
        return sum(self.scores) / len(self.scores) if self.scores else None

    @property
    def sd(self) -> float | None:
        """Standard deviation over seeds."""
        return sd_over_seeds(self.scores)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean; None below three seeds."""
        return mean_interval(self.scores, least=self.rounding)

    def having(self, status: str) -> int:
        """The number of its runs with this status."""
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
    labels = unique([clipped(name) for name in names])
    judged = {
        str(row.get("name")): row for row in map(table, listed(comparison.results.get("arms"))) if table(row)
    }
    images = number(comparison.plan.get("images"), 0)
    least = rounding_variance(int(images)) if comparison.metric == "top1" and images >= 1 else 0.0
    made = []
    for index, (name, label) in enumerate(zip(names, labels, strict=True)):
        cells = [cell for cell in comparison.cells if cell.arm == name]
        options = cells[0].options if cells else {str(k): str(v) for k, v in table(planned.get(name)).items()}
        lost = _diverged(judged.get(name, {}))
        made.append(ArmView(name, label, index, options, cells, comparison.metric, lost, least))
    return made


def _diverged(row: dict[str, Any]) -> tuple[float, float, float] | None:
    """The interval and the mean of an arm with diverged runs, as results.json has them."""
    values = [*listed(row.get("diverged_interval"))[:2], row.get("mean_with_diverged")]
    found = [value for one in values if (value := number(one)) is not None]
    return (found[0], found[1], found[2]) if number(row.get("diverged"), 0) and len(found) == 3 else None


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
    sign = -1 if comparison.metric == "loss" else 1
    scored = []
    for arm in arms:
        judged = kept.get(arm.name)
        if (mean := arm.mean) is not None:
            scored.append((mean if judged is None else judged, arm))
    return max(scored, key=lambda pair: sign * pair[0])[1] if scored else None
