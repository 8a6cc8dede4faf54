"""Ticks are few, round, and enclose the values."""

from __future__ import annotations

import pytest

from fathoms.drawing.ticks import log_ticks, short_number, tick_label, ticks


@pytest.mark.parametrize("span", [1e-9, 0.03, 0.7, 1.0, 12.0, 99.0, 1234.5, 3e7])
def test_ticks_are_few_round_and_enclose_the_values(span):
    found = ticks(0.1 * span, 1.1 * span, 5)
    assert 2 <= len(found) <= 8
    assert found[0] <= 0.1 * span * (1 + 1e-6)
    assert found[-1] >= 1.1 * span * (1 - 1e-6)


@pytest.mark.parametrize(
    ("low", "high"), [(0.03, 0.17), (1e-8, 1e3), (2.0, 2.0), (1.0, 10.0), (9.7e-5, 1.01e-4)]
)
@pytest.mark.parametrize("of", [ticks, log_ticks])
def test_linear_and_logarithmic_ticks_enclose_the_values(low, high, of):
    found = of(low, high, 5)
    assert found[0] <= low * (1 + 1e-9)
    assert found[-1] >= high * (1 - 1e-9)
    assert 2 <= len(found) <= 9


def test_labels_have_the_digits_of_the_step_and_short_powers():
    assert [tick_label(value, 0.25) for value in (0.0, 0.25, 1.0)] == ["0.0", "0.2", "1.0"]
    assert [tick_label(value, 500.0) for value in (0.0, 1500.0)] == ["0", "1,500"]
    assert tick_label(2e-12, 1e-12) == "2.0e-12"
    assert [short_number(value) for value in (0.0, 1e-5, 2e12, 0.123456)] == ["0", "1e-5", "2e12", "0.1235"]
