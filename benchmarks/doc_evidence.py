"""Tables and figures of docs/evidence.md, from the comparisons in results/compare/."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from doc_format import Read, Row, span, table
from fathoms.report.comparison.figures import FOLDER, figures
from fathoms.report.comparison.files import read_comparison

# Folder in results/compare/ of each question that has been run.
QUESTIONS = ("stem_patch4", "stem_patch8", "norms_by_depth", "small_norms")

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


def trials_by_budget(read: Read) -> str:
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


def ln0(read: Read) -> str:
    """Mean scale of the four centre and the four corner pixels of a patch, over the seeds."""
    rows = read("compare/stem_patch4/ln0")["seeds"]
    centre, corner = (
        f"{min(r[k] for r in rows):.3f} to {max(r[k] for r in rows):.3f}" for k in ("centre", "corner")
    )
    above = sum(row["centre"] > row["corner"] for row in rows)
    return f"centre {centre}, corners {corner}, the centre above the corners in {above} of {len(rows)} seeds"


def _stem_means(read: Read) -> dict[tuple[int, str, str], Row]:
    """Means over the seeds of results/stem_gradients.json, by patch size, start and stem norm."""
    rows = read("stem_gradients")["rows"]
    kinds: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["patch_size"], row["stem_init"], row["stem_norm"]), []).append(row)
    return {
        kind: {
            key: statistics.fmean(row[key] for row in own) for key in ("ratio_before", "ratio_after", "share")
        }
        for kind, own in kinds.items()
    }


def stem_gradients(read: Read) -> str:
    """Gradient on the patch projection over that of the median branch, before and after ten updates, by stem norm."""
    means = _stem_means(read)
    norms = list(dict.fromkeys(norm for _, _, norm in means))
    starts = list(dict.fromkeys((patch, start) for patch, start, _ in means))
    return table(
        ["patch", "start", *norms],
        (
            [str(patch), f"`{start}`"]
            + [
                f"{means[patch, start, norm]['ratio_before']:.1f} → {means[patch, start, norm]['ratio_after']:.1f}"
                for norm in norms
            ]
            for patch, start in starts
        ),
    )


def stem_growth(read: Read) -> str:
    """How much that ratio grows with Dual PatchNorm and with the others, and the projection's share of the gradient."""
    means = _stem_means(read)
    growth = {kind: row["ratio_after"] / row["ratio_before"] for kind, row in means.items()}
    dual = span((value for (_, _, norm), value in growth.items() if norm == "dual"), ".1f")
    others = span((value for (_, _, norm), value in growth.items() if norm != "dual"), ".1f")
    after = [
        (start, row["share"])
        for (_, start, norm), row in means.items()
        if norm in ("post", "dual", "post_pos")
    ]
    here, there = (
        span((100 * share for start, share in after if start == name), ".0f")
        for name in ("trunc_normal", "fan_in")
    )
    return (
        f"with Dual PatchNorm it grows {dual} times in ten updates, with every other stem {others} times; with a norm "
        f"after the projection, that one layer has {here} % of the squared gradient at the start used above, "
        f"{there} % at timm's"
    )


TEXTS: dict[str, Callable[[Read], str]] = {
    f"evidence-{folder.replace('_', '-')}": lambda read, folder=folder: arms_table(read, folder)
    for folder in QUESTIONS
} | {
    "evidence-ln0": ln0,
    "evidence-trials": trials_by_budget,
    "evidence-stem-gradients": stem_gradients,
    "evidence-stem-growth": stem_growth,
}
