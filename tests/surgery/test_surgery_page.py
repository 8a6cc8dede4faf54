"""The tables of docs/surgery.md are those that benchmarks/surgery.py makes of the stored results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["docs/surgery.md", "results/surgery.md"])
def test_both_tables_are_generated_from_the_stored_results(page):
    spec = importlib.util.spec_from_file_location("surgery_benchmark", ROOT / "benchmarks" / "surgery.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    results = json.loads((ROOT / "results" / "surgery.json").read_text())
    text = (ROOT / page).read_text()
    for table in (benchmark.peer_table(results["peers"]), benchmark.trained_table(results["digits"])):
        assert "\n".join(table) in text
