"""Loss and gradient norm by update, and the guard's events, from a run's updates.jsonl and guard.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fathoms.files.jsonl import Row, epoch_of
from fathoms.report.quantities import clipped
from fathoms.report.run.chart import Points
from fathoms.report.run.files import listed, number, table

MOST_POINTS = 400
"""Points of a line; more updates are averaged over equal spans."""
MOST_EVENTS = 60

ACTS = {"log": "logged", "skip": "update skipped", "rollback": "rolled back", "stop": "run stopped"}
KINDS = {
    "not_finite": "not a finite number",
    "spike": "loss spike",
    "evaluation_not_finite": "evaluation not finite",
}


def by_update(rows: Sequence[Row], field: str) -> Points:
    """(update, value) of "loss" or "gradient_norm", averaged over spans; None where no value is finite."""
    found: list[tuple[float, float | None]] = []
    for row in rows:
        first = number(row.get("update"))
        if first is not None:
            found += [(first + place, number(value)) for place, value in enumerate(listed(row.get(field)))]
    span = max(1, -(-len(found) // MOST_POINTS))
    return [_mean(found[start : start + span]) for start in range(0, len(found), span)]


def _mean(points: Sequence[tuple[float, float | None]]) -> tuple[float, float | None]:
    known = [value for _, value in points if value is not None]
    return points[-1][0], sum(value / len(known) for value in known) if known else None


@dataclass(frozen=True)
class Event:
    """One event of the guard, as text."""

    place: str
    kind: str
    act: str
    numbers: str
    cause: str


def guard_events(rows: Sequence[Row]) -> tuple[list[Event], int]:
    """The first events of the guard, and how many there are in all."""
    return [_event(row) for row in rows[:MOST_EVENTS]], len(rows)


def _event(row: Row) -> Event:
    update = number(row.get("update"))
    # Rows without a version count updates from 0 too.
    place = "" if update is None else f", update {update + ('version' not in row):g}"
    numbers = [
        f"{name} {value:.4g}"
        for key, name in (("loss", "loss"), ("gradient_norm", "gradient norm"), ("score", "deviations"))
        if (value := number(row.get(key))) is not None
    ]
    cause = table(row.get("cause"))
    where = [str(cause[key]) for key in ("layer", "gradient", "overflow") if cause.get(key)]
    files = [str(name) for name in listed(cause.get("files"))]
    if files:
        where.append(f"images {', '.join(files[:3])}" + (f" and {len(files) - 3} more" if files[3:] else ""))
    return Event(
        f"epoch {epoch_of(row):g}{place}",
        KINDS.get(str(row.get("kind")), clipped(str(row.get("kind")), 60)),
        ACTS.get(str(row.get("act")), "not the best" if "act" not in row else clipped(str(row["act"]), 60)),
        ", ".join(numbers),
        clipped("; ".join(where), 300),
    )
