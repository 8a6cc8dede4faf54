"""The report page of a comparison or a set of runs, with its provenance and the command of its leading arm."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fathoms.comparing.statistics import MIN_SEEDS
from fathoms.comparing.verdicts import UNDECIDED
from fathoms.report.arm_views import ArmView, arm_row, arms_of, cell_row, leading, page_data, tuning_remarks
from fathoms.report.figures import arm_norms, differences_figure, norms_figure, scores_figure
from fathoms.report.html import embedded_figure, fill
from fathoms.report.records import (
    CellRecord,
    ComparisonRecord,
    clipped,
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


DECIDED_BY_BY = ("--by", "--budget", "--seeds")
"""Flags with a value that a command for more seeds does without."""


def question(arms: Sequence[ArmView], comparison: ComparisonRecord) -> str:
    """What is compared, as a question; the name where that would take more than three options."""
    names = list(dict.fromkeys(name for arm in arms for name in arm.options))
    varied = [name for name in names if len({arm.options.get(name) for arm in arms}) > 1]
    if not comparison.plan or not 1 <= len(varied) <= 3:
        return clipped(comparison.name)
    words = [clipped(name, 40).replace("_", " ") for name in varied]
    return f"Which {' and '.join([', '.join(words[:-1]), words[-1]] if len(words) > 1 else words)}?"


def spent(arms: Sequence[ArmView], comparison: ComparisonRecord) -> list[str]:
    """Data, epochs, seeds, runs and time."""
    plan, cells = comparison.plan, [cell for arm in arms for cell in arm.cells]
    recipe, said = table(table(plan.get("base")).get("recipe")), list[str]()
    if data := plan.get("data"):
        said.append(clipped(Path(str(data)).name, 60))
    if (epochs := number(recipe.get("epochs"))) is not None:
        said.append(plural(int(epochs), "epoch"))
    most = max((len(arm.cells) for arm in arms), default=0)
    looks = [shown(look) for look in listed(plan.get("looks"))]
    said += [
        plural(len(arms), "arm"),
        f"looks at {', '.join(looks)} seeds" if looks else plural(most, "seed"),
    ]
    counts = Counter(cell.status for cell in cells)
    order = ("done", "stalled", "diverged", "failed", "running", "pending", "not needed")
    said.append(
        f"{plural(len(cells), 'run')}: {', '.join(f'{counts[word]} {word}' for word in order if counts[word])}"
    )
    seconds = [cell.seconds for cell in cells if cell.seconds is not None]
    return said + ([f"{duration(sum(seconds))} of training"] if seconds else [])


def resolution(comparison: ComparisonRecord) -> tuple[str, int | None]:
    """Whether these seeds could decide, in a sentence, and the seeds of each arm that would; None if not known."""
    margin, metric = number(comparison.plan.get("margin")), comparison.metric
    rows = [table(row) for row in listed(comparison.results.get("verdicts"))]
    sides = [(number(row.get("low")), number(row.get("high"))) for row in rows]
    halves = sorted((high - low) / 2 for low, high in sides if low is not None and high is not None)
    if margin is None or not rows:
        return "", None
    if not halves:
        return f"No: a verdict needs {MIN_SEEDS} seeds of each arm.", None
    reach = (
        f"Intervals reach ±{amount(halves[len(halves) // 2], metric)}, and {amount(margin, metric)} matter."
    )
    undecided = [row for row in rows if row.get("verdict") == UNDECIDED]
    if not undecided:
        return f"Yes: every pair that was tested is decided. {reach}", None
    said = f"Not all of it: {len(undecided)} of {plural(len(halves), 'pair')} are undecided. {reach}"
    more = [number(row.get("more")) for row in undecided]
    if any(seeds is None for seeds in more):
        return said, None
    have = max((int(number(row.get("n"), 0)) for row in undecided), default=0)
    return f"{said} About {int(max(more))} more seeds of each arm would show that.", have + int(max(more))


def amount(value: float, metric: str) -> str:
    """A difference with its unit."""
    unit = {"top1": " points", "seconds": " s"}.get(metric, " of loss")
    return f"{score(value, metric)}{unit}"


def more_seeds(comparison: ComparisonRecord, seeds: int | None) -> str:
    """The command that goes on to so many seeds; empty where they are not known, or Python code planned it."""
    asked = [str(word) for word in listed(comparison.plan.get("command"))]
    if seeds is None or not asked:
        return ""
    words = [
        word
        for before, word in zip(["", *asked], asked, strict=False)
        if word not in (*DECIDED_BY_BY, "--dry-run", "--no-pilot") and before not in DECIDED_BY_BY
    ]
    return clipped(shlex.join(["fathoms", *words, "--seeds", str(seeds)]), 4000)


def caveats(arms: Sequence[ArmView], comparison: ComparisonRecord) -> list[str]:
    """What to know before these verdicts are published."""
    results, plan = comparison.results, comparison.plan
    rows = [table(row) for row in listed(results.get("verdicts"))]
    said = [clipped(str(why), 200) for why in listed(results.get("exploratory"))]
    images = number(plan.get("images"), 0)
    if rows and not any(row.get("new_images") for row in rows) and math.isfinite(images):
        said.append(f"the verdict is about these {images:,.0f} held-out images, not about new ones")
    varied = {name for arm in arms for name in arm.options}
    if plan and not comparison.tuning and "lr" not in varied:
        said.append("the learning rate is the same for every arm: --tune lr=… finds each its own")
    epochs = number(table(table(plan.get("base")).get("recipe")).get("epochs"))
    if epochs is not None:
        said.append(f"runs have {plural(int(epochs), 'epoch')}: longer ones may rank otherwise")
    counts = Counter(cell.status for arm in arms for cell in arm.cells)
    words = ("diverged", "failed", "stalled", "pending", "running")
    said += [f"{plural(counts[word], 'run')} {word}" for word in words if counts[word]]
    return said if results else []


def typeset(text: str, arms: Sequence[ArmView]) -> str:
    """The answer with the short names of arms and a minus before numbers; why it is exploratory stands below it."""
    text, exploratory, _ = text.partition("; exploratory:")
    text = re.sub("^no ", "No ", text) + (". This is exploratory." if exploratory else "")
    for arm in sorted(arms, key=lambda arm: -len(arm.name)):
        if arm.label != arm.name:
            text = text.replace(repr(arm.name), f"“{arm.label}”").replace(arm.name, arm.label)
    return re.sub(r"(?<![\w.\])-])-(?=\d)", "−", text)


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
