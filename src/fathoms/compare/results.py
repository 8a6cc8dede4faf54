"""Results of a comparison: rows of cells, verdicts, and the files that hold them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.compare.cells import Cell
from fathoms.compare.folder import VERSION, ComparisonFolder
from fathoms.errors import ConfigError
from fathoms.files.csv_cells import inert
from fathoms.files.untrusted import read_json, read_plain

if TYPE_CHECKING:
    import numpy as np

    from fathoms.compare.arms import Arm, Metric

MAX_FILE = 256 << 20


def gather(cells: Sequence[Cell], folder: ComparisonFolder, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each cell of the plan, in its order; nothing in it depends on a clock."""
    return [row_of(cell, folder.status(cell), folder, plan) for cell in cells]


def row_of(
    cell: Cell, status: Mapping[str, Any], folder: ComparisonFolder, plan: Mapping[str, Any]
) -> dict[str, Any]:
    """The row of one cell: test where there is one, else val.

    A run that did not come to its end has no score on test, and none on val in its place.
    """
    from fathoms.compare.statistics import is_stalled

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
    }
    if row["status"] == "done" and row[plan["metric"]] is None:
        # Such as a loss above all numbers beside an accuracy.
        row |= {"status": "diverged", "reason": f"{plan['metric']} is not a finite number"}
    if row["status"] == "done" and is_stalled(row["top1"], plan["classes"], plan["images"]):
        row["status"] = "stalled"
    return row


def correct_of(run: Path, images: int) -> np.ndarray | None:
    """Whether a run classified each held-out image correctly, from its bits; None without them, or if damaged."""
    import numpy as np

    try:
        packed = read_plain(run / "correct.bits", MAX_FILE)
    except OSError:
        return None
    if len(packed) != -(-images // 8):
        return None
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=images)


def _correct_of_all(rows: Sequence[Mapping[str, Any]], root: Path, images: int) -> np.ndarray | None:
    """The bits of an arm's runs, a row each; None unless all have them."""
    import numpy as np

    found = [None if row["run"] is None else correct_of(root / row["run"], images) for row in rows]
    known = [bits for bits in found if bits is not None]
    return np.stack(known) if known and len(known) == len(found) else None


def judged(
    rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], root: Path | None = None
) -> dict[str, Any]:
    """results.json: the rows, the verdicts and the answer in a sentence.

    Args:
        rows: The cells, as `gather` has them.
        plan: The plan.
        root: The comparison's folder, whose runs have a bit for each held-out image; None leaves new images out.
    """
    from fathoms.compare.leader import leader
    from fathoms.compare.verdicts import Rules, judge

    metric, arms = _metric_of(plan), _arms_of(rows, plan, root)
    # More runs may turn what the first ones show.
    interim = any(row["status"] == "pending" for row in rows)
    rules = Rules(metric, plan["margin"], plan["floor"], plan["baseline"], plan["paired"])
    verdicts = judge(arms, rules)
    return {
        "version": VERSION,
        "metric": metric.name,
        "margin": plan["margin"],
        "answer": ("so far: " if interim else "") + leader(arms, verdicts, metric),
        "arms": [_summary(arm, metric.chance) for arm in arms],
        "cells": [dict(row) for row in rows],
        "verdicts": [verdict.to_json() for verdict in verdicts],
    }


def _metric_of(plan: Mapping[str, Any]) -> Metric:
    """The measure that decides, with the score of a guess."""
    from fathoms.compare.arms import Metric
    from fathoms.compare.spread import rounding_variance

    if plan["metric"] == "top1":
        return Metric("top1", "points", 1, 100 / plan["classes"], rounding_variance(plan["images"]))
    return Metric("loss", "", -1, math.log(plan["classes"]))


def _arms_of(rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], root: Path | None) -> list[Arm]:
    """The arms with the scores of their ended runs, and the bits of each image where a folder has them."""
    from fathoms.compare.arms import Arm

    arms: list[Arm] = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        ended = [row for row in own if row["status"] in ("done", "stalled")]
        counts = {
            kind: sum(row["status"] == kind for row in own) for kind in ("diverged", "failed", "stalled")
        }
        correct = None if root is None else _correct_of_all(ended, root, plan["images"])
        scores = tuple((row["seed"], row[plan["metric"]]) for row in ended)
        arms.append(Arm(name, scores, **counts, settings=own[0]["arm"], correct=correct))
    return arms


def _summary(arm: Arm, chance: float) -> dict[str, Any]:
    """An arm's row of results.json."""
    from fathoms.compare.spread import sd_over_seeds

    return {
        "name": arm.name,
        "seeds": len(arm.scores),
        "mean": _number(arm.mean()),
        "sd": sd_over_seeds(arm.values),
        "mean_with_diverged": _number(arm.mean_with_diverged(chance)),
        "diverged": arm.diverged,
        "diverged_interval": list(arm.divergence()),
        "stalled": arm.stalled,
        "failed": arm.failed,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_table(results: Mapping[str, Any]) -> str:
    """table.md: the answer, the arms with their spread, the verdicts."""
    from fathoms.compare.arms import DIGITS

    digits = DIGITS[results["metric"]]
    lines = [
        results["answer"] + ".",
        "",
        f"| arm | seeds | {results['metric']} | sd | diverged | with diverged at chance | stalled | failed |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for arm in results["arms"]:
        cells = [_cell(arm["name"]), arm["seeds"], _shown(arm["mean"], digits), _shown(arm["sd"], digits)]
        cells += [_share(arm), _shown(arm["mean_with_diverged"], digits), arm["stalled"], arm["failed"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "| pair | difference | corrected interval | on new images | p | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["verdicts"]:
        interval = _interval([row["low"], row["high"]], digits)
        further = _interval(row.get("new_images") or [None, None], digits)
        pair = f"{_cell(row['a'])} − {_cell(row['b'])}"
        shown = _shown(row["difference"], digits)
        numbers = f"{shown} | {interval} | {further} | {_shown(row['p'], 4)}"
        lines.append(f"| {pair} | {numbers} | {_cell(row['sentence'])} |")
    return "\n".join(lines) + "\n"


def _interval(sides: Sequence[float | None], digits: int) -> str:
    return "–" if None in sides else " to ".join(_shown(side, digits) for side in sides)


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
    table.writerow(["arm", *options, "seed", "status", "split", "top1", "loss", "run"])
    for row in rows:
        values = [row["name"], *(row["arm"].get(option, "") for option in options)]
        rest = [row[key] for key in ("seed", "status", "split", "top1", "loss", "run")]
        table.writerow([inert(value) for value in values + rest])
    return written.getvalue()


def options_of(row: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a cell's arm, with the values that were tuned for it."""
    tuned = next((arm["best"] for arm in results.get("tuning", ()) if arm["name"] == row["name"]), None)
    return {**row["arm"], **(tuned or {})}


def write_results(folder: ComparisonFolder, results: Mapping[str, Any]) -> None:
    """results.json, table.md and results.csv."""
    folder.write("results.json", json.dumps(results, indent=1) + "\n")
    folder.write("table.md", as_table(results))
    folder.write("results.csv", as_csv(results))


def load_results(folder: str | Path) -> list[dict[str, Any]]:
    """The cells of a comparison as plain rows, for pandas or a loop.

    Each has its arm's options and tuned values by name, and `arm_name`, `seed`, `status`, `split`, `top1`, `loss`,
    `reason` and `run`.

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
    kept = ("seed", "status", "split", "top1", "loss", "reason", "run")
    try:
        return [
            {"arm_name": row["name"], **options_of(row, table), **{key: row[key] for key in kept}}
            for row in rows
        ]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: a cell in it is damaged; give the command of the comparison again"
        ) from error
