"""Tables and figures of docs/evidence.md, from the comparisons in results/compare/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from doc_format import Read, Row, table
from fathoms.report.comparison.figures import FOLDER, figures
from fathoms.report.comparison.files import read_comparison

# Folder in results/compare/ of each question that has been run.
QUESTIONS = ("stem_patch4", "stem_patch8", "norms_by_depth")

SHOWN = ("scores.svg", "differences.svg", "tuning.svg")
"""Figures of a comparison that are published; `fathoms report` draws the others too."""


def drawn(root: Path) -> dict[Path, str]:
    """The published figures of every question, by their file."""
    made: dict[Path, str] = {}
    for name in QUESTIONS:
        folder = root / "results" / "compare" / name
        every = figures(read_comparison(folder))
        made |= {folder / FOLDER / figure: every[figure] for figure in SHOWN if figure in every}
    return made


def arms_table(read: Read, folder: str) -> str:
    """Every arm with its seeds, mean, deviation and the corrected difference to the baseline, with its verdict."""
    results = read(f"compare/{folder}/results")
    head = [
        "arm",
        "seeds",
        "test top-1",
        "sd",
        "difference",
        "corrected interval",
        "on new images",
        "verdict",
    ]
    verdicts = {verdict["a"]: verdict for verdict in results["verdicts"]}
    return table(head, (_row(arm, verdicts.get(arm["name"])) for arm in results["arms"]))


def _row(arm: Row, verdict: Row | None) -> list[str]:
    lost = [f"{arm[kind]} {kind}" for kind in ("diverged", "stalled", "failed") if arm[kind]]
    scores = ("" if arm[key] is None else f"{arm[key]:.2f}" for key in ("mean", "sd"))
    own = [arm["name"], ", ".join([str(arm["seeds"]), *lost]), *scores]
    if verdict is None:
        return [*own, "", "", "", ""]
    if verdict["low"] is None:
        return [*own, "", "", "", verdict["verdict"]]
    gap, low, high = (f"{verdict[key]:+.2f}" for key in ("difference", "low", "high"))
    new = " to ".join(f"{edge:+.2f}" for edge in verdict["new_images"] or ())
    words = {"a better": "better", "b better": "worse"}
    return [*own, gap, f"{low} to {high}", new, words.get(verdict["verdict"], verdict["verdict"])]


def ln0(read: Read) -> str:
    """Mean scale of the four centre and the four corner pixels of a patch, over the seeds."""
    rows = read("compare/stem_patch4/ln0")["seeds"]
    centre, corner = (
        f"{min(r[k] for r in rows):.3f} to {max(r[k] for r in rows):.3f}" for k in ("centre", "corner")
    )
    above = sum(row["centre"] > row["corner"] for row in rows)
    return f"centre {centre}, corners {corner}, the centre above the corners in {above} of {len(rows)} seeds"


TEXTS: dict[str, Callable[[Read], str]] = {
    f"evidence-{folder.replace('_', '-')}": lambda read, folder=folder: arms_table(read, folder)
    for folder in QUESTIONS
} | {"evidence-ln0": ln0}
