"""Generated texts by the name of their markers; lists, ranges and tables for them, and the numbers of results/."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Read = Callable[[str], Any]
Row = dict[str, Any]
TEXTS: dict[str, Callable[[Read], str]] = {}
"""What makes the text between `<!-- generated: NAME -->` and `<!-- end -->`, by its name."""


def text(made: Callable[[Read], str]) -> Callable[[Read], str]:
    """Register a generated text under the name of its function."""
    TEXTS[made.__name__.replace("_", "-")] = made
    return made


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
