"""Published comparisons: their verdicts are those that their runs get today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fathoms.comparing.results import as_csv, as_table, judged

ROOT = Path(__file__).parents[1]
COMPARISONS = sorted(path.parent for path in (ROOT / "results" / "compare").glob("*/results.json"))


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: folder.name)
def test_published_verdicts_are_those_that_the_runs_get_today(folder):
    plan, kept = (json.loads((folder / f"{name}.json").read_text()) for name in ("plan", "results"))
    now = judged(kept["cells"], plan, folder, kept.get("tuning", ()))
    assert now["answer"] == kept["answer"]
    assert [arm["name"] for arm in now["arms"]] == [arm["name"] for arm in kept["arms"]]
    for here, there in zip(now["arms"] + now["verdicts"], kept["arms"] + kept["verdicts"], strict=True):
        for key, value in here.items():
            exact = isinstance(value, str | None) or key == "diverged_interval"
            assert there[key] == (value if exact else pytest.approx(value, rel=1e-9)), (folder.name, key)
    assert (folder / "table.md").read_text() == as_table(kept)
    assert (folder / "results.csv").read_text() == as_csv(kept)
