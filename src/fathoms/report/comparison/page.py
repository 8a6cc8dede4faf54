"""The report page of a comparison, or of a set of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fathoms.report.comparison.arms import ArmView, arms_of, leading
from fathoms.report.comparison.axis_map import axis_maps
from fathoms.report.comparison.files import CellRecord, ComparisonRecord
from fathoms.report.comparison.provenance import differing, growth, machines, made_by, shared
from fathoms.report.comparison.scatter import cost_scatters
from fathoms.report.comparison.series import page_data
from fathoms.report.comparison.strips import difference_strips, score_strips
from fathoms.report.comparison.train_command import train_command
from fathoms.report.comparison.tuning import tuning_curves
from fathoms.report.html import fill
from fathoms.report.quantities import clipped, count, duration, file_size, score
from fathoms.report.run.files import number
from fathoms.text_table import plural

ORDER = ("done", "stalled", "diverged", "failed", "running", "pending")


def render_comparison(comparison: ComparisonRecord, live: bool = False) -> str:
    """The page as HTML; a live one refreshes itself."""
    arms, metric = arms_of(comparison), comparison.metric
    best = leading(arms, comparison)
    tuned, edges = tuning_curves(arms, comparison.tuning, metric)
    environment, mixed = machines(arms)
    options, settings = differing(arms)
    data = page_data(arms)
    return fill(
        "comparison.html",
        styles=("page.css", "comparison.css", "uPlot.min.css"),
        scripts=("uPlot.iife.min.js", "live.js", "tables.js", "curves.js", "depth.js", "comparison.js"),
        data=data,
        probed=bool(data["depth"]["maps"]),
        live=live,
        name=clipped(comparison.name),
        planned=bool(comparison.plan),
        status=status(comparison.cells),
        answer=answer(comparison),
        best=best,
        command=train_command(best, comparison) if best else "",
        notes=[*growth(comparison), *edges, *mixed],
        headline=headline(arms, comparison),
        troubles=troubles(arms),
        alarming=any(arm.having(word) for arm in arms for word in ("diverged", "failed")),
        metric=metric,
        arms=[arm_row(arm) for arm in arms],
        cells=[cell_row(arm, cell) for arm in arms for cell in arm.cells],
        scores=score_strips(arms, metric),
        differences=difference_strips(arms, comparison),
        maps=axis_maps(arms, metric),
        costs=cost_scatters(arms, metric),
        tuned=tuned,
        options=options,
        settings=settings,
        tables=[
            ("How it was made", made_by(comparison)),
            ("Versions and hardware", environment),
            *shared(comparison),
        ],
    )


def answer(comparison: ComparisonRecord) -> str:
    """The verdict in a sentence."""
    told = comparison.results.get("answer")
    if isinstance(told, str) and told:
        return clipped(told, 1200).rstrip(".") + "."
    if comparison.plan:
        return "No run has ended yet."
    return (
        "No verdict: these runs were not planned as a comparison. Means and spreads below only describe them."
    )


def status(cells: Sequence[CellRecord]) -> tuple[str, str]:
    """The word at the top and its class."""
    counts = Counter(cell.status for cell in cells)
    ended = sum(counts[word] for word in ("done", "stalled", "diverged"))
    if counts["failed"]:
        return f"{ended} of {len(cells)} ended, {counts['failed']} failed", "bad"
    return (
        (f"{plural(len(cells), 'run')} ended", "good")
        if ended == len(cells)
        else (f"{ended} of {len(cells)} ended", "open")
    )


def headline(arms: Sequence[ArmView], comparison: ComparisonRecord) -> list[tuple[str, str, str]]:
    """The numbers at the top: label, value and remark."""
    cells = [cell for arm in arms for cell in arm.cells]
    counts = Counter(cell.status for cell in cells)
    words = ", ".join(f"{counts[word]} {word}" for word in ORDER if counts[word])
    most = max((len(arm.cells) for arm in arms), default=0)
    rows = [("runs", str(len(cells)), words), ("arms", str(len(arms)), f"up to {plural(most, 'seed')} each")]
    unit = "points" if comparison.metric == "top1" else "of loss"
    # That of a loss is not known, and written as 0.
    if floor := number(comparison.plan.get("floor")):
        images = number(comparison.plan.get("images"), 0)
        rows.append(
            ("noise floor", score(floor, comparison.metric), f"{unit}, {images:,.0f} held-out images")
        )
    if (margin := number(comparison.plan.get("margin"))) is not None:
        rows.append(("smallest difference", score(margin, comparison.metric), f"{unit} that matter"))
    seconds = [cell.seconds for cell in cells if cell.seconds is not None]
    if seconds:
        rows.append(("training", duration(sum(seconds)), "all runs together"))
    return rows


def troubles(arms: Sequence[ArmView]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Runs that diverged, failed or stalled: arm, seed and reason, by kind."""
    made = []
    for word in ("diverged", "failed", "stalled"):
        rows = [
            (
                arm.label,
                clipped(cell.seed, 20),
                clipped(cell.reason, 400) or "within two standard errors of guessing",
            )
            for arm in arms
            for cell in arm.cells
            if cell.status == word
        ]
        if rows:
            made.append((word, rows))
    return made


def arm_row(arm: ArmView) -> tuple[ArmView, list[tuple[str, float | None]]]:
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
        (score(arm.sd, arm.metric), arm.sd),
        (span, low),
        (", ".join(words) or "–", float(lost)),
        ("–" if seconds is None else duration(seconds), seconds),
        ("–" if memory is None else file_size(memory), memory),
        ("–" if speed is None else f"{speed:,.0f}", speed),
    ]


def cell_row(arm: ArmView, cell: CellRecord) -> tuple[ArmView, CellRecord, list[tuple[str, float | None]]]:
    """The row of a cell: texts with the numbers they sort by."""
    parameters = number(cell.record.summary.get("parameters"))
    return (
        arm,
        cell,
        [
            ("–" if cell.top1 is None else f"{cell.top1:.2f}", cell.top1),
            ("–" if cell.loss is None else f"{cell.loss:.4f}", cell.loss),
            (str(cell.epoch), float(cell.epoch)),
            ("–" if parameters is None else count(parameters), parameters),
            ("–" if cell.seconds is None else duration(cell.seconds), cell.seconds),
            ("–" if cell.memory is None else file_size(cell.memory), cell.memory),
            ("–" if cell.speed is None else f"{cell.speed:,.0f}", cell.speed),
        ],
    )
