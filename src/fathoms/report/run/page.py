"""The report page of one run: headline, curves, norms by layer, settings and files."""

from __future__ import annotations

from typing import Any

from fathoms.drawing.colours import RAMP
from fathoms.report.html import fill
from fathoms.report.quantities import count, duration, file_size, shown
from fathoms.report.run import chart, heatmap
from fathoms.report.run.evaluation import evaluated, examples
from fathoms.report.run.files import RunRecord, listed, number, table
from fathoms.report.run.origin import SHOWN, command, model_words, origin
from fathoms.report.run.updates import by_update, guard_events
from fathoms.text_table import plural


def render_run(run: RunRecord, live: bool = False) -> str:
    """The page as HTML; a live one refreshes itself and links to no files."""
    charts = [made for made in _charts(run) if made is not None]
    update_charts = [made for made in _update_charts(run) if made is not None]
    events, event_count = guard_events(run.guard)
    shown_examples = examples(run)
    maps = [
        heatmap.draw("Gradient on the stream", "gradient", run.probes),
        heatmap.draw("Gradient of the weights", "weights", run.probes),
        heatmap.draw("Activations of the stream", "stream", run.probes),
        heatmap.draw("Branch over stream", "ratio", run.probes),
    ]
    return fill(
        "run.html",
        styles=("page.css", "run.css"),
        scripts=("live.js", "run.js"),
        data={made.key: hover(made) for made in (*charts, *update_charts)},
        live=live,
        images=bool(shown_examples),
        run=run,
        reason=run.summary.get("reason"),
        headline=headline(run),
        charts=charts,
        update_charts=update_charts,
        events=events,
        event_count=event_count,
        evaluated=evaluated(run),
        examples=shown_examples,
        command=command(run),
        origin=origin(run),
        maps=[made for made in maps if made is not None],
        ramp=RAMP,
        tables=tables(run),
        classes=[str(name) for name in listed(run.config.get("classes"))],
        geometry=chart,
    )


def _charts(run: RunRecord) -> list[chart.Chart | None]:
    def lines(field: str, train: str, val: str) -> dict[str, tuple[str, chart.Points]]:
        return {train: ("train", run.series("train", field)), val: ("val", run.series("val", field))}

    accuracy = lines("top1", "train top-1", "val top-1") | {"val top-5": ("other", run.series("val", "top5"))}
    rate = {"learning rate": ("train", run.series("train", "lr"))}
    speed = {"images per second": ("train", run.series("train", "images_per_second"))}
    return [
        chart.draw("loss", "Loss", lines("loss", "train", "val")),
        chart.draw("accuracy", "Accuracy", accuracy, " %"),
        chart.draw("lr", "Learning rate", rate, floor=0.0),
        chart.draw("speed", "Images per second", speed, floor=0.0),
    ]


def _update_charts(run: RunRecord) -> list[chart.Chart | None]:
    loss = {"loss": ("train", by_update(run.updates, "loss"))}
    norm = {"gradient norm": ("other", by_update(run.updates, "gradient_norm"))}
    return [
        chart.draw("update-loss", "Loss", loss, x_name="update"),
        chart.draw("update-norm", "Gradient norm", norm, floor=0.0, x_name="update"),
    ]


def hover(made: chart.Chart) -> dict[str, Any]:
    """Data for the tooltips of a chart."""
    return {
        "x": made.x_range,
        "left": chart.LEFT / chart.WIDTH,
        "right": 1 - chart.RIGHT / chart.WIDTH,
        "unit": made.unit,
        "name": made.x_name,
        "series": [
            {"name": line.name, "style": line.style, "points": made.points[line.name]} for line in made.lines
        ],
    }


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
