"""The published comparisons, judged by the rules of now."""

import json
from pathlib import Path

import pytest

from fathoms.comparing.results import judged

PUBLISHED = Path(__file__).parents[2] / "results" / "compare"


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in PUBLISHED.glob("*/plan.json")))
def test_published_verdicts_are_those_of_the_rules_of_now(folder):
    kept = {
        name: json.loads((PUBLISHED / folder / f"{name}.json").read_text())
        for name in ("plan", "results", "tuning")
        if (PUBLISHED / folder / f"{name}.json").is_file()
    }
    tuned = kept.get("tuning", {}).get("arms", [])
    now = judged(kept["results"]["cells"], kept["plan"], PUBLISHED / folder, tuned)
    assert now["answer"] == kept["results"]["answer"]
    assert now["exploratory"] == kept["results"]["exploratory"]
    said = [(row["a"], row["b"], row["verdict"], row["sentence"]) for row in now["verdicts"]]
    assert said == [
        (row["a"], row["b"], row["verdict"], row["sentence"]) for row in kept["results"]["verdicts"]
    ]
    for row, before in zip(now["verdicts"], kept["results"]["verdicts"], strict=True):
        for key in ("difference", "low", "high", "p"):
            assert row[key] == (None if before[key] is None else pytest.approx(before[key], rel=1e-6))
