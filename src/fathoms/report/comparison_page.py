"""The report page of a comparison or a set of runs, with its provenance and the command of its leading arm."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fathoms.report.arm_views import ArmView, arms_of, leading, page_data, tuning_remarks
from fathoms.report.figures import (
    arm_norms,
    differences_figure,
    norms_figure,
    scores_figure,
)
from fathoms.report.first_screen import caveats, more_seeds, question, resolution, spent, typeset
from fathoms.report.html import embedded_figure, fill
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
from fathoms.text_table import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def train_command(arm: ArmView) -> str:
    """The command that trains an arm alone, from the config of its first run; empty where no run has begun."""
    folders = [cell.record.folder for cell in arm.cells if cell.record.folder is not None]
    if not folders:
        return ""
    words = ["--config", str(folders[0] / "config.toml"), "--output", "runs", "--experiment", folders[0].name]
    return shlex.join(["fathoms", "train", *words])


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


def render_comparison(comparison: ComparisonRecord, made: Mapping[str, Figure], reload: int = 0) -> str:
    """The page as HTML, with its figures by name."""
    arms, metric = arms_of(comparison), comparison.metric
    best = leading(arms, comparison)
    shows, needed = resolution(comparison)
    edges = tuning_remarks(arms, comparison.tuning)
    drawn = _drawn(arms, comparison, made)
    environment, mixed = machines(arms)
    options, settings = differing(arms)
    return fill(
        "comparison.html",
        styles=("page.css", "comparison.css", "uPlot.min.css"),
        scripts=("uPlot.iife.min.js", "shared.js", "tables.js", "curves.js", "comparison.js"),
        data=page_data(arms),
        images=bool(drawn["norms"] or drawn["axes"]),
        reload=reload,
        name=clipped(comparison.name),
        planned=bool(comparison.plan),
        status=status(comparison.cells),
        question=question(arms, comparison),
        spent=spent(arms, comparison),
        answer=typeset(answer(comparison), arms),
        shows=shows,
        caveats=caveats(arms, comparison),
        more=more_seeds(comparison, needed),
        best=best,
        command=train_command(best) if best else "",
        notes=[*growth(comparison), *edges, *mixed],
        troubles=troubles(arms),
        alarming=any(arm.having(word) for arm in arms for word in ("diverged", "failed")),
        metric=metric,
        sets=(sets := list(dict.fromkeys(name for cell in comparison.cells for name in cell.robustness))),
        arms=[arm_row(arm, sets) for arm in arms],
        cells=[cell_row(arm, cell, sets) for arm in arms for cell in arm.cells],
        drawn=drawn,
        options=options,
        settings=settings,
        tables=[
            ("How it was made", made_by(comparison)),
            ("Versions and hardware", environment),
            *shared(comparison),
        ],
    )


def _drawn(
    arms: Sequence[ArmView], comparison: ComparisonRecord, made: Mapping[str, Figure]
) -> dict[str, dict[str, Markup]]:
    narrow = {
        "scores": scores_figure(arms, comparison, narrow=True),
        "differences": differences_figure(arms, comparison, narrow=True),
    }
    drawn = {
        name: embedded_figure(name, figure, narrow.get(name))
        for name, figure in made.items()
        if not name.startswith("curves")
    }
    kinds = ("scores", "differences", "tuning", "axes", "cost")
    sections = {kind: {name: one for name, one in drawn.items() if name.startswith(kind)} for kind in kinds}
    norms = {
        title: embedded_figure(f"norms{i}", norms_figure(maps, columns=3))
        for i, (title, maps) in enumerate(arm_norms(arms).items())
    }
    return {**sections, "norms": norms}


def answer(comparison: ComparisonRecord) -> str:
    told = comparison.results.get("answer")
    if isinstance(told, str) and told:
        return clipped(told, 1200).rstrip(".") + "."
    if comparison.plan:
        return "No run has ended yet."
    return (
        "No verdict: these runs were not planned as a comparison. Means and spreads below only describe them."
    )


def status(cells: Sequence[CellRecord]) -> tuple[str, str]:
    """The word at the top and its class; runs that no look asks for are not awaited."""
    counts = Counter(cell.status for cell in cells if cell.status != "not needed")
    ended, asked = sum(counts[word] for word in ("done", "stalled", "diverged")), counts.total()
    if counts["failed"]:
        return f"{ended} of {asked} ended, {counts['failed']} failed", "bad"
    if ended == asked:
        return f"{plural(asked, 'run')} ended", "good"
    return f"{ended} of {asked} ended", "open"


def troubles(arms: Sequence[ArmView]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Runs that diverged, failed or stalled: arm, seed and reason, by kind."""
    made = []
    for word in ("diverged", "failed", "stalled"):
        rows = [
            (
                arm.label,
                clipped(cell.seed, 20),
                clipped(cell.reason, 400) or "no better than one answer for all images",
            )
            for arm in arms
            for cell in arm.cells
            if cell.status == word
        ]
        if rows:
            made.append((word, rows))
    return made


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
