"""How speed is measured: contenders in turns, the median, and shares of what the device could do."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest

from fathoms.bench.race import Contender, Setting, race, shares_of_limit
from fathoms.errors import FathomsError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_contenders_take_turns():
    order = []
    contenders = [Contender(name, lambda name=name: order.append(name)) for name in ("a", "b")]
    result = race(contenders, batch=8, turns=2, steps=3)
    assert [name for name, _ in itertools.groupby(order)] == ["a", "b", "a", "b"]
    assert result["a"]["images_per_second"] == pytest.approx(8 / (result["a"]["ms"] / 1e3))


def test_the_median_turn_counts(monkeypatch):
    seconds = iter([1.0, 9.0, 2.0])
    monkeypatch.setattr("fathoms.bench.race._seconds", lambda *_: next(seconds))
    row = race([Contender("a", lambda: None)], batch=10, turns=3)["a"]
    assert row["ms"] == 2000.0
    assert row["spread"] == pytest.approx(4.0)


def test_shares_count_a_backward_pass_twice():
    limits = {"matrix_tflops": 1.0, "copy_tbps": 1.0}
    train = shares_of_limit(10**9, 1.0, 100.0, limits, "train")
    infer = shares_of_limit(10**9, 1.0, 100.0, limits, "infer")
    assert train["matrix_share"] == pytest.approx(0.06)
    assert infer["matrix_share"] == pytest.approx(0.02)
    assert train["bytes_share"] == pytest.approx(2 * 2**30 / 1e9 / 100)


@pytest.mark.parametrize(
    "words", [{"precision": "bf17"}, {"compile": "all"}, {"launch": "now"}, {"keep": "some"}]
)
def test_unknown_settings_are_refused(words):
    with pytest.raises(FathomsError, match="did you mean"):
        Setting(**words)


def test_a_table_can_be_written_when_no_row_has_succeeded(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = runpy.run_path(str(BENCHMARKS / "models.py"))
    assert "| cait | failed: out of memory |" in script["as_table"](
        {"rows": {"cait": {"failed": "out of memory"}}}
    )
