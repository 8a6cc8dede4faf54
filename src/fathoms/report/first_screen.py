"""The first screen of a comparison's page: the question, what was spent, what these seeds can show, what is next."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fathoms.comparing.statistics import MIN_SEEDS
from fathoms.comparing.verdicts import UNDECIDED
from fathoms.report.arm_views import ArmView
from fathoms.report.records import ComparisonRecord, clipped, duration, listed, number, score, shown, table
from fathoms.text_table import plural

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
