"""The report page of one run: headline, curves, guard events, norms by layer, origin, settings and files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fathoms.plotting.panels import Points
from fathoms.report.arm_views import packed
from fathoms.report.confusions import evaluated, examples
from fathoms.report.figures import NORMS, Curves, norm_map, norms_figure, run_figure
from fathoms.report.html import embedded_figure, fill
from fathoms.report.records import (
    RunRecord,
    clipped,
    count,
    duration,
    file_size,
    listed,
    number,
    shown,
    table,
)
from fathoms.text_table import plural
from fathoms.untrusted import Row, epoch_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 400
"""Points of a line; more updates are averaged over equal spans."""
MOST_EVENTS = 60

ACTS = {"log": "logged", "skip": "update skipped", "rollback": "rolled back", "stop": "run stopped"}
KINDS = {
    "not_finite": "not a finite number",
    "spike": "loss spike",
    "evaluation_not_finite": "evaluation not finite",
}


def by_update(rows: Sequence[Row], field: str) -> list[tuple[float, float | None]]:
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
    place = "" if update is None else f", update {update:g}"
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


SHOWN = (
    "commit",
    "project_commit",
    "processor",
    "cores",
    "threads",
    "memory",
    "gpu",
    "gpu_memory",
    "version",
)
"""Entries of environment.json that `origin` shows."""


def model_words(run: RunRecord) -> str:
    """The shape of the model in words; its name where no shape is recorded, as of timm's models."""
    model = table(run.config.get("model"))
    depth, dim, patch = (number(model.get(key)) for key in ("depth", "dim", "patch_size"))
    if depth is None or dim is None:
        return str(model.get("name", ""))
    return f"{depth:g} blocks of {dim:g} channels" + ("" if patch is None else f", patch {patch:g}")


def command(run: RunRecord) -> str:
    """The command that started the run, quoted for a shell; empty where code did."""
    words = [str(word) for word in listed(_first_start(run).get("command"))]
    return clipped(shlex.join(words), 4000) if words else ""


def origin(run: RunRecord) -> list[tuple[str, str]]:
    """Start, host, commits, device and memory, as far as they are recorded."""
    environment, start = run.environment, _first_start(run)
    starts = [table(one) for one in listed(environment.get("starts"))]
    rows = [("started", _time(start)), ("host", start.get("host")), ("folder", start.get("folder"))]
    if len(starts) > 1:
        rows.append(("resumed", f"{plural(len(starts) - 1, 'time')}, last {_time(starts[-1])}"))
    gpu = environment.get("gpu")
    if (memory := number(environment.get("gpu_memory"))) is not None and gpu:
        gpu = f"{gpu}, {file_size(memory)}"
    rows += [("GPU", gpu), ("processor", environment.get("processor"))]
    if (threads := number(environment.get("threads"))) is not None:
        rows.append(("threads", f"{threads:g} on {number(environment.get('cores'), 0):g} cores"))
    if (memory := number(environment.get("memory"))) is not None:
        rows.append(("memory of the machine", file_size(memory)))
    rows += [
        ("commit of fathoms", environment.get("commit")),
        ("commit of the working folder", environment.get("project_commit")),
    ]
    return [(clipped(name, 80), clipped(shown(value), 300)) for name, value in rows if value]


def _first_start(run: RunRecord) -> dict[str, Any]:
    return table(next(iter(listed(run.environment.get("starts"))), None))


def _time(start: dict[str, Any]) -> str:
    return str(start.get("time", "")).replace("T", " ").replace("+00:00", " UTC")


def render_run(run: RunRecord, reload: int = 0) -> str:
    charts = run_charts(run)
    events, event_count = guard_events(run.guard)
    shown_examples = examples(run)
    maps = {field: norm_map("", run.probes, field) for field in NORMS}
    return fill(
        "run.html",
        styles=("page.css", "run.css", "uPlot.min.css"),
        scripts=("uPlot.iife.min.js", "shared.js", "curves.js", "run.js"),
        data={across: _group(across, own) for across, own in charts.items()},
        reload=reload,
        images=bool(shown_examples) or any(maps.values()),
        run=run,
        reason=run.summary.get("reason"),
        answer=answer(run),
        next=next_commands(run),
        headline=headline(run),
        charts=charts,
        events=events,
        event_count=event_count,
        evaluated=evaluated(run),
        examples=shown_examples,
        command=command(run),
        origin=origin(run),
        maps={
            NORMS[field]: embedded_figure(field, norms_figure([one]))
            for field, one in maps.items()
            if one is not None
        },
        tables=tables(run),
        classes=[str(name) for name in listed(run.config.get("classes"))],
    )


def run_charts(run: RunRecord) -> dict[str, list[Curves]]:
    """The curves of a run by what they go over, "epoch" and "update"; those without a value are left out."""

    def lines(field: str) -> dict[str, Points]:
        return {split: run.series(split, field) for split in ("train", "val")}

    speed = {"train": run.series("train", "images_per_second")}
    charts = {
        "epoch": [
            Curves("Loss", "", lines("loss")),
            Curves("Accuracy", "%", lines("top1") | {"val top-5": run.series("val", "top5")}),
            Curves("Learning rate", "", {"train": run.series("train", "lr")}, 0.0),
            Curves("Images per second", "", speed, 0.0),
        ],
        "update": [
            Curves("Loss", "", {"train": by_update(run.updates, "loss")}),
            Curves("Gradient norm", "", {"train": by_update(run.updates, "gradient_norm")}, 0.0),
        ],
    }
    return {
        across: found for across, own in charts.items() if (found := list(filter(None, map(_known, own))))
    }


def run_plot(run: RunRecord) -> Figure:
    """Loss, accuracy, learning rate and speed by epoch, loss and gradient norm by update."""
    return run_figure(run_charts(run), run.name)


def _known(chart: Curves) -> Curves | None:
    lines = {name: points for name, points in chart.lines.items() if any(y is not None for _, y in points)}
    return chart._replace(lines=lines) if lines else None


def _group(across: str, charts: Sequence[Curves]) -> dict[str, Any]:
    """Charts on one horizontal axis, as the page's script draws them."""
    names = list(dict.fromkeys(name for chart in charts for name in chart.lines))
    grid = sorted({x for chart in charts for points in chart.lines.values() for x, _ in points})

    def line(points: Points | None) -> str | None:
        found = dict(points or ())
        return packed([np.nan if (y := found.get(x)) is None else y for x in grid]) if found else None

    return {
        "x": across,
        "epochs": grid,
        "arms": [{"name": name, "colour": place, "dash": 0} for place, name in enumerate(names)],
        "cells": [[place, ""] for place in range(len(names))],
        "charts": [
            {
                "title": chart.title,
                "unit": chart.unit,
                "floor": chart.floor,
                "lines": [line(chart.lines.get(name)) for name in names],
            }
            for chart in charts
        ],
    }


RISING = 0.5
"""Points by which the last quarter of the epochs must be above all before for accuracy to be rising still."""


def answer(run: RunRecord) -> str:
    """Accuracy of which weights on how many images, and whether the run had converged; empty before an end."""
    last, test = table(run.summary.get("last")), table(run.summary.get("test"))
    split, measured = ("test", test) if number(test.get("top1")) is not None else ("val", last)
    top1, images = number(measured.get("top1")), number(measured.get("images"), 0)
    if run.status != "done" or top1 is None:
        return ""
    on = f"{images:,.0f} {split} images" if images else split
    said = f"{top1:.2f} % of {on} are classified correctly by the last weights."
    curve = [(epoch, value) for epoch, value in run.series("val", "top1") if value is not None]
    if len(curve) < 4:
        return said
    early, late = curve[: -(len(curve) // 4)], curve[-(len(curve) // 4) :]
    before, after = (max(value for _, value in part) for part in (early, late))
    if after > before + RISING:
        return f"{said} Accuracy on val was still rising, by {after - before:.1f} points: train longer."
    best = max(curve, key=lambda point: point[1])
    if best[1] > curve[-1][1] + 1:
        lost = f"{best[1] - curve[-1][1]:.1f} points above the last"
        return f"{said} Accuracy on val was best after epoch {best[0]:g}, {lost}: compare checkpoints/best."
    return f"{said} Accuracy on val has levelled off."


def next_commands(run: RunRecord) -> list[tuple[str, str]]:
    """What may be done with a run that ended: what for, and the command."""
    if run.status != "done" or run.folder is None:
        return []
    folder = shlex.quote(str(run.folder))
    return [
        ("Classify your images", f"fathoms predict IMAGES --checkpoint {folder}"),
        ("Take the model elsewhere", f"fathoms export {folder}"),
    ]


def headline(run: RunRecord) -> list[tuple[str, str, str]]:
    """The numbers at the top: label, value and remark."""
    summary = run.summary
    best, last, test = (table(summary.get(key)) for key in ("best", "last", "test"))
    rows: list[tuple[str, str, str]] = []
    if (top1 := number(test.get("top1"))) is not None:
        rows.append(
            ("test accuracy", f"{top1:.2f} %", f"{number(test.get('images'), 0):,.0f} images, last weights")
        )
    if (top1 := number(best.get("top1"))) is not None:
        rows.append(("best val accuracy", f"{top1:.2f} %", f"epoch {number(best.get('epoch'), 0):g}"))
    if (top1 := number(last.get("top1"))) is not None:
        rows.append(("last val accuracy", f"{top1:.2f} %", f"{number(last.get('images'), 0):,.0f} images"))
    if (loss := number(last.get("loss"))) is not None:
        calibration = number(last.get("calibration_error"))
        remark = "" if calibration is None else f"calibration error {calibration:.2f} %"
        rows.append(("last val loss", f"{loss:.4f}", remark))
    if (parameters := number(summary.get("parameters"))) is not None:
        rows.append(("parameters", count(parameters), model_words(run)))
    if (seconds := number(summary.get("seconds"))) is not None:
        epochs, updates = number(summary.get("epoch"), 0), number(summary.get("updates"), 0)
        rows.append(
            ("training", duration(seconds), f"{plural(int(epochs), 'epoch')}, {updates:,.0f} updates")
        )
    if (peak := number(summary.get("peak_memory"))) is not None:
        rows.append(("peak memory", file_size(peak), "on the device"))
    return rows


def tables(run: RunRecord) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every setting by section, and the environment of the run."""
    plain = {k: v for k, v in run.config.items() if not isinstance(v, dict) and k != "classes"}
    sections = [("Run", plain | table(run.config.get("run")))]
    sections += [(name.capitalize(), table(run.config.get(name))) for name in ("model", "recipe")]
    machine = {
        k: v
        for k, v in run.environment.items()
        if not isinstance(v, dict | list) and v is not None and k not in SHOWN
    }
    sections.append(("Environment", machine | table(run.environment.get("versions"))))
    return [(name, [(str(k), shown(v)) for k, v in rows.items()]) for name, rows in sections if rows]
