"""Tables of start-up, of profiles and of latency, for docs/speed.md, made from results/."""

from __future__ import annotations

from collections.abc import Callable

from doc_format import Read, Row, table

RUNS = ("first, caches empty", "second, caches full", "caches full, no compile workers")
GROUPS = {
    "products, attention": ("products", "attention"),
    "element-wise": ("norms, residuals, activations",),
    "optimizer and casts": ("optimizer", "copies and casts"),
    "other kernels": ("other",),
    "between kernels": ("between kernels",),
}
FLOORS = {
    "products, attention": "products and attention",
    "element-wise": "norms, residuals, activations",
    "optimizer and casts": "optimizer and casts",
}
# The phases of a start that take longest; the rest are one column.
PHASES = ("imports", "compiler", "data", "first batch", "first update")


def startup_table(read: Read) -> str:
    """The start of a run, before and after it was cut."""
    now = read("startup")
    head = ["run", "first update after, s", "6 epochs, wall clock, s", *(f"{phase}, s" for phase in PHASES)]
    rows = []
    for name in RUNS:
        for label, report in (("before: ", now["before"]), ("", now)):
            if name in report:
                rows.append([f"{label}{name}", *_start(report[name])])
    return table(head, rows)


def _start(run: Row) -> list[str]:
    phases = run["phases"]
    taken = (f"{phases[phase]['seconds']:.1f}" if phase in phases else "" for phase in PHASES)
    return [f"{phases['first update']['ended']:.1f}", f"{run['wall']:.1f}", *taken]


def cifar_default(read: Read) -> str:
    """The default command on CIFAR-10 over seeds."""
    report = read("cifar_default")
    return (
        f"at {report['images_per_second']:,.0f} images/s or more and to {report['top1']:.2f} % of the test set "
        f"(sd {report['top1_sd']:.2f}, {len(report['runs'])} seeds, all 50,000 images, "
        f"{report['runs'][0]['epochs']} epochs)"
    )


def profiles_table(read: Read) -> str:
    """Milliseconds of an update by kind of kernel, and in brackets the floor of that kind."""
    rows = read("profiles")["rows"]
    head = ["model, batch", "update, ms", *GROUPS]
    return table(head, ([f"{name}, {row['batch']}", *_kinds(row)] for name, row in rows.items()))


def _kinds(row: Row) -> list[str]:
    cells = [f"{row['wall_us'] / 1e3:.1f}"]
    for group, kinds in GROUPS.items():
        took = sum(row["kinds"].get(kind, 0.0) for kind in kinds) / 1e3
        floor = f" ({row['floors'][FLOORS[group]] / 1e3:.1f})" if group in FLOORS else ""
        cells.append(f"{took:.1f}{floor}")
    return cells


def latency_table(read: Read) -> str:
    """Median and 99th percentile of single calls."""
    rows = list(read("latency")["rows"].values())
    batches = list(rows[0]["batches"])
    head = ["model", "form", "run as", *(f"batch {batch}" for batch in batches)]
    return table(head, ([row["model"], row["form"], row["run"], *_calls(row, batches)] for row in rows))


def _calls(row: Row, batches: list[str]) -> list[str]:
    found = (row["batches"].get(batch, {}) for batch in batches)
    return [
        f"{own['p50_ms']:.1f} / {own['p99_ms']:.1f}" if "p50_ms" in own else "not measured" for own in found
    ]


TEXTS: dict[str, Callable[[Read], str]] = {
    made.__name__.replace("_", "-"): made
    for made in (startup_table, cifar_default, profiles_table, latency_table)
}
"""Generated texts by the name of their markers."""
