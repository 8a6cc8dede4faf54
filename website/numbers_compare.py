"""The simulated errors of a comparison for docs/compare.md, from results/compare_statistics.json."""

from __future__ import annotations

import re

from doc_format import Read, Row, listed, span, table, text

PAIRS = ("1 pair", "5 pairs", "15 pairs")


@text
def compare_errors(read: Read) -> str:
    """Each plan by its pairs: the greater error and the lesser coverage of equal and unequal spreads."""
    found: dict[str, dict[str, list[Row]]] = {}
    for name, row in read("compare_statistics")["rows"].items():
        plan = re.fullmatch(r"(?P<plan>.*), (?P<pairs>\d+ pairs?), (equal spreads|spreads 1 to 4)", name)
        if plan is not None:
            words = re.sub(r"best \d after 3", "the best go on after 3", plan["plan"])
            found.setdefault(words, {}).setdefault(plan["pairs"], []).append(row)
    head = ["equal arms called different, %", *PAIRS, "an interval covers, % at least"]
    rows = []
    for plan, kinds in found.items():
        errors = [
            f"{100 * max(row['error'] for row in kinds[pairs]):.1f}" if pairs in kinds else ""
            for pairs in PAIRS
        ]
        least = min(row["coverage"] for own in kinds.values() for row in own)
        rows.append([plan, *errors, f"{100 * least:.1f}"])
    for words, names in CONTROLS.items():
        own = [
            read("compare_statistics")["rows"].get(name.format(pairs)) for name in names for pairs in PAIRS
        ]
        errors = [f"**{100 * row['error']:.1f}**" if row else "" for row in own]
        least = min(row["coverage"] for row in own if row)
        rows.append([words, *errors, f"{100 * least:.1f}"])
    return table(head, rows)


CONTROLS = {
    "no plan: looks at 3, 5, 10 seeds, each with 5 %": ("control: unplanned looks at 3, 5, 10 seeds, {}",),
    "no rule: tuned by the best of single trials, 5 seeds": (
        "control: tuned by the best trial, curve: parabola, 5 seeds, {}",
    ),
}


@text
def compare_counts(read: Read) -> str:
    kept = read("compare_statistics")
    wrong = [name for name, row in kept["rows"].items() if row.get("holds") is False]
    beyond = f"all but {len(wrong)} ({listed(wrong)})" if wrong else "all"
    curves = [row["error"] for name, row in kept["rows"].items() if name.startswith("tuned, curve")]
    promised = [row["seen"] for name, row in kept["rows"].items() if name.startswith("promised")]
    return (
        f"{len(kept['rows'])} rows of {kept['trials']:,} comparisons each; {beyond} within their bounds of 5 % and two "
        f"standard errors. Tuned on five kinds of curves, one pair errs in {span([100 * e for e in curves], '.1f')} %. "
        f"The difference that a plan of 3 to 10 seeds and 1 to 45 pairs promises four times in five is found in "
        f"{span([100 * p for p in promised], '.1f')} %"
    )
