"""Cells of CSV files that a spreadsheet takes for text, not for a formula to run."""

from __future__ import annotations

from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Signs that begin a formula, or that a spreadsheet skips before one."""


def inert(value: Any) -> Any:
    """The value of a cell; a text that a spreadsheet would run gets a quote in front. Numbers stay numbers.

    >>> inert("=1+1"), inert("-0.5"), inert(-0.5), inert("cat")
    ("'=1+1", '-0.5', -0.5, 'cat')
    """
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
