"""Lists, ranges and tables of the generated pages, and the types of their functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Read = Callable[[str], Any]
Row = dict[str, Any]


def reader(root: Path) -> Read:
    """A function that loads results/NAME.json of a checkout."""
    return lambda name: json.loads((root / "results" / f"{name}.json").read_text())


def listed(texts: Iterable[str]) -> str:
    """Texts as a list in a sentence.

    >>> listed(["1.4", "2.0", "3.1"])
    '1.4, 2.0 and 3.1'
    """
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def span(values: Iterable[float], form: str) -> str:
    """The least and the greatest number."""
    kept = list(values)
    return f"{min(kept):{form}} to {max(kept):{form}}"


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *rest])
