"""Plain text for the terminal: tables, and counts with their nouns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A header and its rows as left-aligned columns.

    >>> print(aligned(("part", "into"), [("norm.weight", "fc1.weight")]))
    part         into
    norm.weight  fc1.weight
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "epoch"), plural(2, "epoch")
    ('1 epoch', '2 epochs')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
