"""Tables and figures of docs/evidence.md, from the comparisons in results/compare/."""

from __future__ import annotations

import functools
from pathlib import Path

from doc_format import TEXTS, Read, Row, table, text
from fathoms.plotting.style import to_svg
from fathoms.report.figures import FOLDER, figures
from fathoms.report.records import read_comparison

# Folder in results/compare/ of each question that has been run.
QUESTIONS = ("scaler_depth36", "norms_depth12", "stem_patch4", "stem_patch8", "norms_by_depth", "small_norms")

WITHDRAWN = ("small_norms",)
"""Comparisons whose baseline had a worse rate than its neighbour: no winner of theirs is named."""

SHOWN = ("scores", "differences", "tuning")
"""Figures of a comparison that are published; `fathoms report` draws the others too."""


def drawn(root: Path) -> dict[Path, str]:
    """The published figures of every question, by their file."""
    made: dict[Path, str] = {}
    for name in QUESTIONS:
        folder = root / "results" / "compare" / name
        every = figures(read_comparison(folder))
        made |= {folder / FOLDER / f"{name}.svg": to_svg(every[name]) for name in SHOWN if name in every}
    return made


def arms_table(folder: str, read: Read) -> str:
    """Every arm with its seeds, mean, deviation and the corrected difference to the baseline, with its verdict."""
    results = read(f"compare/{folder}/results")
    head = ["arm", "seeds", "test top-1", "sd", "difference", "corrected interval", "verdict"]
    verdicts = {verdict["a"]: verdict for verdict in results["verdicts"]}
    words = {name: verdict_word(folder, results, verdict) for name, verdict in verdicts.items()}
    return table(
        head, (_row(arm, verdicts.get(arm["name"]), words.get(arm["name"], "")) for arm in results["arms"])
    )


def verdict_word(folder: str, results: Row, verdict: Row) -> str:
    """A verdict in the words of the pages."""
    word = {"a better": "better", "b better": "worse"}.get(verdict["verdict"])
    if word is None:
        return verdict["verdict"]
    if folder in WITHDRAWN:
        return "withdrawn"
    return f"{word}, exploratory" if results["exploratory"] else word


def _row(arm: Row, verdict: Row | None, word: str) -> list[str]:
    lost = [f"{arm[kind]} {kind}" for kind in ("diverged", "stalled", "failed") if arm[kind]]
    scores = ("" if arm[key] is None else f"{arm[key]:.2f}" for key in ("mean", "sd"))
    own = [arm["name"], ", ".join([str(arm["seeds"]), *lost]), *scores]
    if verdict is None:
        return [*own, "", "", ""]
    if verdict["low"] is None:
        return [*own, "", "", word]
    gap, low, high = (f"{verdict[key]:+.2f}" for key in ("difference", "low", "high"))
    return [*own, gap, f"{low} to {high}", word]


@text
def evidence_trials(read: Read) -> str:
    """Accuracy on val of every trial of a learning rate, after 8 and after 30 epochs."""
    short, whole = (read(f"compare/{name}/tuning")["arms"] for name in ("small_norms_short", "small_norms"))
    tried = {arm["name"]: arm for arm in short}
    rates = [trial["choice"]["lr"] for trial in whole[0]["trials"]]
    rows = []
    for arm in whole:
        pairs = zip(tried[f"{arm['name']}, depth=12"]["trials"], arm["trials"], strict=True)
        rows.append([arm["name"], *(f"{_top1(early)} → {_top1(late)}" for early, late in pairs)])
    return table(["norm", *rates], rows)


def _top1(trial: Row) -> str:
    return trial["status"] if trial["top1"] is None else f"{trial['top1']:.1f}"


def gap(folder: str, name: str, read: Read) -> str:
    """One arm against the baseline: points, corrected interval, seeds."""
    results = read(f"compare/{folder}/results")
    verdict = next(each for each in results["verdicts"] if each["a"] == name)
    difference, low, high = (f"{verdict[key]:+.1f}" for key in ("difference", "low", "high"))
    seeds = min(arm["seeds"] for arm in results["arms"] if arm["name"] in (name, verdict["b"]))
    return f"{difference} points ({low} to {high}), {seeds} seeds"


# Arms whose distance to the baseline stands in a sentence.
GAPS = {
    "scaler-36": ("scaler_depth36", "scaler"),
    "norms12-scaler": ("norms_depth12", "scaler"),
    "norms12-dyt": ("norms_depth12", "dyt"),
    "norms12-derf": ("norms_depth12", "derf"),
    "scaler-12": ("norms_by_depth", "scaler, normal, depth=12"),
    "post-pos-4": ("stem_patch4", "stem_norm=post_pos"),
    "post-pos-8": ("stem_patch8", "stem_norm=post_pos"),
}
for key, (folder, arm) in GAPS.items():
    TEXTS[f"gap-{key}"] = functools.partial(gap, folder, arm)
for folder in QUESTIONS:
    TEXTS[f"evidence-{folder.replace('_', '-')}"] = functools.partial(arms_table, folder)
