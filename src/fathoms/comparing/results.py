"""Results of a comparison: rows of cells, verdicts, and the files that hold them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fathoms.comparing.answer import EXPLORATORY, TUNED_BY_BEST, answer, headline, optimism
from fathoms.comparing.arms import DIGITS, Arm, Metric
from fathoms.comparing.folder import VERSION, Cell, ComparisonFolder
from fathoms.comparing.plan import target_of
from fathoms.comparing.robustness import mean_scores, sets_of, shown_scores
from fathoms.comparing.statistics import is_stalled, sd_over_seeds
from fathoms.comparing.verdicts import Rules, dropped, judge, wanted_seeds
from fathoms.errors import ConfigError
from fathoms.files import inert
from fathoms.untrusted import read_json, read_lines, read_plain

MAX_FILE = 256 << 20
SCORED = ("done", "stalled")
"""Statuses of runs that ended with a score."""


def gather(cells: Sequence[Cell], folder: ComparisonFolder, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each cell of the plan, in its order; nothing in it depends on a clock."""
    return [row_of(cell, folder.status(cell), folder, plan) for cell in cells]


def row_of(
    cell: Cell, status: Mapping[str, Any], folder: ComparisonFolder, plan: Mapping[str, Any]
) -> dict[str, Any]:
    """The row of one cell: test where there is one, else val.

    A run that did not come to its end has no score on test, and none on val in its place.
    """
    # Finished runs of before the three roles have val alone, whatever the data has.
    awaited = plan.get("split") == "test" and status.get("status") != "done"
    split = "test" if status.get("test") or awaited else "val"
    measured = status.get(split) if split == "test" else status.get("last")
    row: dict[str, Any] = {
        "arm": dict(cell.settings),
        "name": cell.arm,
        "seed": cell.seed,
        "status": status.get("status", "pending"),
        "split": split,
        "top1": None if measured is None else measured["top1"],
        "loss": None if measured is None else measured["loss"],
        "reason": status.get("reason"),
        "run": str(cell.folder.relative_to(folder.path)) if cell.folder.is_dir() else None,
        **shown_scores(cell.folder),
    }
    if (target := target_of(plan["metric"])) is not None:
        row |= {"seconds": status.get("seconds"), plan["metric"]: seconds_to(cell.folder, target, status)}
    elif row["status"] == "done" and row[plan["metric"]] is None:
        # Such as a loss above all numbers beside an accuracy.
        row |= {"status": "diverged", "reason": f"{plan['metric']} is not a finite number"}
    if row["status"] == "done" and is_stalled(row["top1"], plan["largest_class"], plan["images"]):
        row["status"] = "stalled"
    return row


def seconds_to(run: Path, target: float, status: Mapping[str, Any]) -> float | None:
    """Seconds of training until the accuracy on val was first at its target; None where it never was.

    An epoch's share of the seconds of the whole run is that of its images over its images per second.
    """
    past, step, reached = 0.0, 0, None
    for row in read_lines(run / "metrics.jsonl"):
        if row.get("split") == "train" and row.get("images_per_second"):
            past, step = past + (row["step"] - step) / row["images_per_second"], row["step"]
        elif row.get("split") == "val" and reached is None and (row.get("top1") or 0.0) >= target:
            reached = past
    seconds = status.get("seconds")
    return None if reached is None or not seconds or not past else seconds * reached / past


def correct_of(run: Path, images: int) -> np.ndarray | None:
    """Whether a run classified each held-out image correctly, from its bits; None without them, or if damaged."""
    try:
        packed = read_plain(run / "correct.bits", MAX_FILE)
    except OSError:
        return None
    if len(packed) != -(-images // 8):
        return None
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=images)


def _correct_of_all(rows: Sequence[Mapping[str, Any]], root: Path, images: int) -> np.ndarray | None:
    """The bits of an arm's runs, a row each; None unless all have them."""
    found = [None if row["run"] is None else correct_of(root / row["run"], images) for row in rows]
    known = [bits for bits in found if bits is not None]
    return np.stack(known) if known and len(known) == len(found) else None


def judged(
    rows: Sequence[Mapping[str, Any]],
    plan: Mapping[str, Any],
    root: Path | None = None,
    tuned: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """results.json: the rows, the verdicts and the answer in a sentence.

    Args:
        rows: The cells, as `gather` has them.
        plan: The plan.
        root: The comparison's folder, whose runs have a bit for each held-out image; None leaves new images out.
        tuned: What was chosen for each arm, with the variance that the choice adds to its mean.
    """
    arms = arms_of(rows, plan, root, tuned)
    rules = rules_of(rows, plan, tuned)
    wanted = wanted_seeds(arms, rules, plan.get("seeds", max((row["seed"] + 1 for row in rows), default=0)))
    # A seed that no look asks for is not awaited.
    rows = [
        {**row, "status": "not needed"}
        if row["status"] == "pending" and row["seed"] >= wanted[row["name"]]
        else row
        for row in rows
    ]
    # More runs may turn what the first ones show.
    interim = any(row["status"] == "pending" for row in rows)
    verdicts = judge(arms, rules)
    why, gone = reasons(plan, tuned), dropped(arms, rules)
    said = "; ".join(["so far: " * interim + answer(arms, verdicts, rules), *why])
    return {
        "version": VERSION,
        "metric": rules.metric.name,
        "margin": plan["margin"],
        "headline": headline(plan, rules),
        "exploratory": why,
        "answer": said,
        "optimism": optimism(arms, rules),
        "arms": [
            _summary(arm, rules, arm.name in gone)
            | mean_scores([row for row in rows if row["name"] == arm.name])
            for arm in arms
        ],
        "cells": [dict(row) for row in rows],
        "verdicts": [verdict.to_json() for verdict in verdicts],
    }


def reasons(plan: Mapping[str, Any], tuned: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Why the verdicts are exploratory; nothing where the plan came before the scores."""
    found = [EXPLORATORY] if plan.get("exploratory") else []
    return found + (
        [TUNED_BY_BEST] if any(arm.get("best") and arm.get("rule", "best") == "best" for arm in tuned) else []
    )


def rules_of(
    rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], tuned: Sequence[Mapping[str, Any]] = ()
) -> Rules:
    keep = plan.get("keep_arms")
    return Rules(
        _metric_of(rows, plan),
        plan["margin"],
        plan["baseline"],
        plan["paired"],
        tuple(plan.get("looks", ())),
        None if keep is None else (keep[0], keep[1]),
        bool(reasons(plan, tuned)),
    )


def _metric_of(rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> Metric:
    """The measure that decides, with the score of a diverged run: a guess, or the worst loss that was seen."""
    if plan["metric"] == "top1":
        return Metric("top1", "points", 1, 100 / plan["classes"], plan["images"])
    if (target := target_of(plan["metric"])) is not None:
        # A run that never got there took at least as long as the longest.
        longest = max((row["seconds"] or 0.0 for row in rows), default=0.0)
        words = {"lost": f"did not reach {target:g} %", "loses": f"misses {target:g} %"}
        return Metric(plan["metric"], "s", -1, longest, decimals=1, **words)
    # A model that overfits can have a loss above that of a guess.
    losses = [row["loss"] for row in rows if row["status"] in SCORED]
    return Metric("loss", "", -1, max([math.log(plan["classes"]), *losses]))


def arms_of(
    rows: Sequence[Mapping[str, Any]],
    plan: Mapping[str, Any],
    root: Path | None = None,
    tuned: Sequence[Mapping[str, Any]] = (),
) -> list[Arm]:
    """The arms with the scores of their ended runs, and the bits of each image where a folder has them."""
    luck = {arm["name"]: (arm.get("luck") or {}).get("variance", 0.0) for arm in tuned}
    arms: list[Arm] = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        ended = [row for row in own if row["status"] in SCORED and row[plan["metric"]] is not None]
        seeds = {
            kind: tuple(row["seed"] for row in own if row["status"] == kind)
            for kind in ("diverged", "failed", "stalled")
        }
        if target_of(plan["metric"]) is not None:
            missed = [row["seed"] for row in own if row["status"] in SCORED and row not in ended]
            seeds["diverged"] = tuple(sorted([*seeds["diverged"], *missed]))
        correct = None if root is None else _correct_of_all(ended, root, plan["images"])
        scores = tuple((row["seed"], row[plan["metric"]]) for row in ended)
        more = {"correct": correct, "tuning": luck.get(name, 0.0)}
        arms.append(Arm(name, scores, **seeds, settings=own[0]["arm"], **more))
    return arms


def _summary(arm: Arm, rules: Rules, dropped: bool) -> dict[str, Any]:
    return {
        "name": arm.name,
        "seeds": len(arm.scores),
        "mean": _number(arm.mean()),
        "sd": sd_over_seeds(arm.values),
        "mean_with_diverged": _number(arm.mean_with_diverged(rules.metric.chance)),
        "diverged": len(arm.diverged),
        "diverged_interval": list(arm.divergence()),
        "stalled": len(arm.stalled),
        "failed": len(arm.failed),
        "dropped": dropped,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_table(results: Mapping[str, Any]) -> str:
    """table.md: the answer, the arms with their spread, the verdicts."""
    metric = results["metric"]
    digits, lost = DIGITS.get(metric, 1), "diverged | with diverged at chance"
    if (target := target_of(metric)) is not None:
        lost = f"below {target:g} % | with those as long as the longest"
    lines = [*([results["headline"] + "."] if results.get("headline") else []), results["answer"] + ".", ""]
    sets = sets_of(results["arms"])
    heads = "".join(f" {_cell(name)} |" for name in sets)
    lines.append(f"| arm | seeds | {metric} |{heads} sd | {lost} | stalled | failed |")
    lines.append("|---" * (8 + len(sets)) + "|")
    for arm in results["arms"]:
        name = _cell(arm["name"]) + (" (dropped early)" if arm.get("dropped") else "")
        cells = [name, arm["seeds"], _shown(arm["mean"], digits)]
        cells += [_shown(arm.get("robustness", {}).get(each), DIGITS["top1"]) for each in sets]
        cells += [_shown(arm["sd"], digits)]
        cells += [_share(arm), _shown(arm["mean_with_diverged"], digits), arm["stalled"], arm["failed"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| pair | difference | corrected interval | p | verdict |", "|---|---|---|---|---|"]
    for row in results["verdicts"]:
        sides = [row["low"], row["high"]]
        interval = "–" if None in sides else " to ".join(_shown(side, digits) for side in sides)
        pair = f"{_cell(row['a'])} − {_cell(row['b'])}"
        shown = _shown(row["difference"], digits)
        level = row.get("level")
        p = _shown(row["p"], 4)
        if level is not None and "look" in row["test"]:
            p = f"{row['p']:.2g} (below {level:.2g} to differ)"
        numbers = f"{shown} | {interval} | {p}"
        lines.append(f"| {pair} | {numbers} | {_cell(row['sentence'])} |")
    if any(row.get("new_images") for row in results["verdicts"]):
        lines += ["", "Intervals hold for new images as well as new seeds."]
    return "\n".join(lines) + "\n"


def _share(arm: Mapping[str, Any]) -> str:
    """How many runs of an arm diverged, with Wilson's interval of the share where some did."""
    low, high = arm["diverged_interval"]
    return f"{arm['diverged']} ({low:.0%} to {high:.0%})" if arm["diverged"] else "0"


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _cell(text: str) -> str:
    """A text that stays in its cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def as_csv(results: Mapping[str, Any]) -> str:
    """results.csv: a line a cell, one column for each option of the arms and each that was tuned."""
    rows = [{**row, "arm": options_of(row, results)} for row in results["cells"]]
    options = list(dict.fromkeys(key for row in rows for key in row["arm"]))
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    measures = [*dict.fromkeys(["split", "top1", "loss", results.get("metric", "top1")]), "run"]
    sets = sets_of(rows)
    table.writerow(["arm", *options, "seed", "status", *measures, *map(inert, sets)])
    for row in rows:
        values = [row["name"], *(row["arm"].get(option, "") for option in options)]
        rest = [row[key] for key in ("seed", "status", *measures)]
        rest += [row.get("robustness", {}).get(name) for name in sets]
        table.writerow([inert(value) for value in values + rest])
    return written.getvalue()


def options_of(row: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a cell's arm, with the values that were tuned for it."""
    tuned = next((arm["best"] for arm in results.get("tuning", ()) if arm["name"] == row["name"]), None)
    return {**row["arm"], **(tuned or {})}


def write_results(folder: ComparisonFolder, results: Mapping[str, Any]) -> None:
    folder.write("results.json", json.dumps(results, indent=1) + "\n")
    folder.write("table.md", as_table(results))
    folder.write("results.csv", as_csv(results))


def _as_number(text: Any) -> Any:
    """The text of an option as the number that it is, else as it is."""
    for kind in (int, float):
        with contextlib.suppress(TypeError, ValueError):
            return kind(text)
    return text


def load_results(folder: str | Path) -> list[dict[str, Any]]:
    """The cells of a comparison as plain rows, for pandas or a loop.

    Each has its arm's options and tuned values by name, numbers as numbers, and `arm_name`, `seed`, `status`, `split`,
    `top1`, `loss`, `reason` and `run`.

    >>> rows = load_results("results/compare/stem_patch8")
    >>> len(rows), rows[0]["stem_norm"], rows[0]["seed"], round(rows[0]["top1"], 2)
    (25, 'none', 0, 63.29)
    """
    path = Path(folder) / "results.json"
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder}: no such folder; give the folder of a comparison")
    if not path.is_file():
        raise ConfigError(f"{folder}: holds no results.json; give the folder of a comparison")
    table = read_json(path, ConfigError, MAX_FILE)
    rows = table.get("cells")
    if table.get("version") != VERSION or not isinstance(rows, list):
        raise ConfigError(f"{path}: its version is {table.get('version')!r}; this package reads {VERSION}")
    kept = dict.fromkeys(
        ("seed", "status", "split", "top1", "loss", table.get("metric", "top1"), "reason", "run")
    )
    try:
        return [
            {
                "arm_name": row["name"],
                **{name: _as_number(value) for name, value in options_of(row, table).items()},
                **{key: row[key] for key in kept},
            }
            for row in rows
        ]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: a cell in it is damaged; give the command of the comparison again"
        ) from error
