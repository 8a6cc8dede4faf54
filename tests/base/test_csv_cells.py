"""CSV files hold no formulas, whatever classes and folders are called."""

from __future__ import annotations

import csv

import pytest

from fathoms.comparing.results import as_csv
from fathoms.evaluating.metrics import Confusion
from fathoms.evaluating.results import write_confusion, write_per_class, write_results
from fathoms.files import inert

HOSTILE = ["=cmd|'/c calc'!A1", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_that_would_run_is_quoted(text):
    assert inert(text) == f"'{text}"


@pytest.mark.parametrize("value", ["cat", "", "-1e-3", "+5", -1.5, None, 3])
def test_other_values_stay(value):
    assert inert(value) == value


def test_no_table_of_an_evaluation_begins_a_cell_with_a_formula(tmp_path):
    confusion = Confusion(2, {0: {0: 1, 1: 2}, 1: {0: 3, 1: 4}})
    result = {"top1": -1.0, "per_class": dict.fromkeys(HOSTILE[:2], 50.0), "confusion": confusion}
    for number, write in enumerate((write_results, write_per_class, write_confusion)):
        target = tmp_path / f"{number}.csv"
        write(str(target), {"=data": result})
        cells = [cell for row in csv.reader(target.read_text().splitlines()) for cell in row]
        assert cells
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@"))]


def test_no_table_of_a_comparison_does():
    row = {"name": "=1", "arm": {"lr": "-1e-3", "aa": ""}, "seed": 0, "status": "done", "split": "val"}
    results = {"cells": [{**row, "top1": 1.0, "loss": 2.0, "run": "+x"}]}
    rows = list(csv.reader(as_csv(results).splitlines()))
    assert rows[1] == ["'=1", "-1e-3", "", "0", "done", "val", "1.0", "2.0", "'+x"]
