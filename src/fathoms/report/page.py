"""The report page of a run: one HTML file that loads nothing from the network."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from fathoms.atomic import write_atomic
from fathoms.errors import ConfigError
from fathoms.report import chart, heatmap
from fathoms.report.run_files import RunRecord, listed, number, read_run, table

TEMPLATES = Path(__file__).parent / "templates"
FILE = "report.html"


def write_report(folder: Path, target: Path | None = None) -> Path:
    """Write the report page of a run folder, to report.html in it unless `target` is given; returns its path."""
    text = render(read_run(folder))
    target = folder / FILE if target is None else target
    try:
        write_atomic(target, text.encode())
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror}); give another --output") from error
    return target


def render(run: RunRecord) -> str:
    """The page as HTML."""
    charts = [made for made in _charts(run) if made is not None]
    maps = [
        heatmap.draw("Gradient on the stream", "gradient", run.probes),
        heatmap.draw("Gradient of the weights", "weights", run.probes),
        heatmap.draw("Activations of the stream", "stream", run.probes),
        heatmap.draw("Branch over stream", "ratio", run.probes),
    ]
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("run.css", "run.js"))
    return _template().render(
        run=run,
        reason=run.summary.get("reason"),
        headline=headline(run),
        charts=charts,
        maps=[made for made in maps if made is not None],
        ramp=heatmap.RAMP,
        tables=tables(run),
        classes=[str(name) for name in listed(run.config.get("classes"))],
        geometry=chart,
        style=Markup(style),
        script=Markup(script),
        policy=policy(style, script),
        data=Markup(embedded({made.key: hover(made) for made in charts})),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"href": quote, "size": file_size}
    return environment.get_template("run.html")


def _charts(run: RunRecord) -> list[chart.Chart | None]:
    def lines(field: str, train: str, val: str) -> dict[str, tuple[str, chart.Points]]:
        return {train: ("train", run.series("train", field)), val: ("val", run.series("val", field))}

    accuracy = lines("top1", "train top-1", "test top-1") | {
        "test top-5": ("other", run.series("val", "top5"))
    }
    rate = {"learning rate": ("train", run.series("train", "lr"))}
    speed = {"images per second": ("train", run.series("train", "images_per_second"))}
    return [
        chart.draw("loss", "Loss", lines("loss", "train", "test")),
        chart.draw("accuracy", "Accuracy", accuracy, " %"),
        chart.draw("lr", "Learning rate", rate, floor=0.0),
        chart.draw("speed", "Images per second", speed, floor=0.0),
    ]


def hover(made: chart.Chart) -> dict[str, Any]:
    """Data for the tooltips of a chart."""
    return {
        "x": made.x_range,
        "left": chart.LEFT / chart.WIDTH,
        "right": 1 - chart.RIGHT / chart.WIDTH,
        "unit": made.unit,
        "series": [
            {"name": line.name, "style": line.style, "points": made.points[line.name]} for line in made.lines
        ],
    }


def embedded(value: Any) -> str:
    """JSON that cannot close the script element around it."""
    return (
        json.dumps(value, allow_nan=False)
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )


def policy(style: str, script: str) -> str:
    """A content security policy under which this style and this script run and nothing is loaded."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def headline(run: RunRecord) -> list[tuple[str, str, str]]:
    """The numbers at the top: label, value and remark."""
    summary = run.summary
    best, last = table(summary.get("best")), table(summary.get("last"))
    rows: list[tuple[str, str, str]] = []
    if (top1 := number(best.get("top1"))) is not None:
        rows.append(("best test accuracy", f"{top1:.2f} %", f"epoch {number(best.get('epoch'), 0) + 1:g}"))
    if (top1 := number(last.get("top1"))) is not None:
        rows.append(("last test accuracy", f"{top1:.2f} %", f"{number(last.get('images'), 0):,.0f} images"))
    if (loss := number(last.get("loss"))) is not None:
        calibration = number(last.get("calibration_error"))
        remark = "" if calibration is None else f"calibration error {calibration:.2f}\u00a0%"
        rows.append(("last test loss", f"{loss:.4f}", remark))
    if (parameters := number(summary.get("parameters"))) is not None:
        rows.append(("parameters", count(parameters), str(table(run.config.get("model")).get("name", ""))))
    if (seconds := number(summary.get("seconds"))) is not None:
        epochs, updates = number(summary.get("epoch"), 0), number(summary.get("updates"), 0)
        rows.append(("training", duration(seconds), f"{epochs:g} epochs, {updates:,.0f} updates"))
    if (peak := number(summary.get("peak_memory"))) is not None:
        rows.append(("peak memory", file_size(peak), "on the device"))
    return rows


def tables(run: RunRecord) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every setting by section, and the environment of the run."""
    plain = {k: v for k, v in run.config.items() if not isinstance(v, dict) and k != "classes"}
    sections = [("Run", plain | table(run.config.get("run")))]
    sections += [(name.capitalize(), table(run.config.get(name))) for name in ("model", "recipe")]
    machine = {k: v for k, v in run.environment.items() if not isinstance(v, dict) and v is not None}
    sections.append(("Environment", machine | table(run.environment.get("versions"))))
    return [(name, [(str(k), shown(v)) for k, v in rows.items()]) for name, rows in sections if rows]


def shown(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(shown(inner) for inner in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def count(value: int | float) -> str:
    """A count in thousands or millions."""
    scale, unit = next(((s, u) for s, u in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if value >= s), (1.0, ""))
    return f"{value / scale:.3g}{unit}" if scale > 1 else f"{value:g}"


def duration(seconds: int | float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def file_size(size: int | float) -> str:
    """A size in B, kB, MB or GB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
