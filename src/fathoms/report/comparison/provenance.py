"""Provenance of a comparison: how it was made, what differs, versions, hardware, data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from fathoms.report.comparison.arms import ArmView
from fathoms.report.comparison.files import ComparisonRecord
from fathoms.report.quantities import clipped, file_size, shown
from fathoms.report.run.files import listed, number, table

Rows = list[tuple[str, str]]


def made_by(comparison: ComparisonRecord) -> Rows:
    """Command, data and rules of a comparison."""
    plan = comparison.plan
    rows: Rows = []
    if command := [str(word) for word in listed(plan.get("command"))]:
        rows.append(("command", clipped(shlex.join(["fathoms", *command]), 4000)))
    names = {
        "data": "data",
        "fingerprint": "data fingerprint",
        "images": "held-out images",
        "classes": "classes",
        "metric": "metric",
        "margin": "smallest difference of interest",
        "floor": "noise floor",
        "baseline": "baseline",
        "paired": "paired by seed",
        "version": "version of the plan",
    }
    for key, name in names.items():
        if plan.get(key) is not None and (key != "floor" or number(plan[key])):
            # The rest of a fingerprint is in plan.json.
            rows.append((name, clipped(shown(plan[key]), 33 if key == "fingerprint" else 400)))
    return rows


def growth(comparison: ComparisonRecord) -> list[str]:
    """Sentences on what later commands added to the plan."""
    made = []
    for row in map(table, listed(comparison.plan.get("grown"))):
        arms = [clipped(str(name), 80) for name in listed(row.get("arms"))]
        added = f"arms {', '.join(arms)}" if arms else "no arms"
        seeds = row.get("seeds", "?")
        had = "1 seed" if seeds == 1 else f"{shown(seeds)} seeds"
        made.append(f"A later command added {added}; the plan then had {had} per arm.")
    return made


def machines(arms: Sequence[ArmView]) -> tuple[Rows, list[str]]:
    """Versions and hardware, and a sentence for each entry that is not the same in all cells."""
    values: dict[str, dict[str, int]] = {}
    for cell in (cell for arm in arms for cell in arm.cells):
        environment = cell.record.environment
        # Starts, commands and the version of the file differ by nature.
        flat = {
            key: file_size(value) if key.endswith("memory") and number(value) is not None else value
            for key, value in environment.items()
            if not isinstance(value, dict | list) and key != "version"
        }
        for key, value in (flat | table(environment.get("versions"))).items():
            if value is not None:
                found = values.setdefault(clipped(str(key), 60), {})
                text = clipped(shown(value))
                found[text] = found.get(text, 0) + 1
    rows = [(key, "; ".join(list(found)[:4])) for key, found in values.items()]
    mixed = [key for key, found in values.items() if len(found) > 1]
    return rows, [f"{key} is not the same in all runs" for key in mixed]


def differing(arms: Sequence[ArmView]) -> tuple[list[str], list[tuple[ArmView, list[str]]]]:
    """Options that differ between arms, and each arm's values."""
    names = list(dict.fromkeys(name for arm in arms for name in arm.options))
    kept = [name for name in names if len({arm.options.get(name) for arm in arms}) > 1]
    rows = [(arm, [clipped(arm.options.get(name, "–")) for name in kept]) for arm in arms]
    return [clipped(name, 60) for name in kept], rows


def shared(comparison: ComparisonRecord) -> list[tuple[str, Rows]]:
    """Settings that all arms have in common, by section."""
    base = table(comparison.plan.get("base"))
    plain = {key: value for key, value in base.items() if not isinstance(value, dict) and value is not None}
    sections: list[tuple[str, dict[str, Any]]] = [("Shared by all arms", plain)]
    sections += [
        (f"Shared: {clipped(key, 40)}", value) for key, value in base.items() if isinstance(value, dict)
    ]
    return [
        (
            name,
            [
                (clipped(str(key), 60), clipped(shown(value)))
                for key, value in rows.items()
                if value is not None
            ],
        )
        for name, rows in sections
        if rows
    ]
