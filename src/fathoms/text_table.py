"""Plain text for the terminal: tables, names to choose from, and counts with their nouns."""

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


def one_of(names: Sequence[str]) -> str:
    """Names to choose from, in words.

    >>> one_of(["cosine", "wsd", "custom"]), one_of(["step"])
    ('cosine, wsd or custom', 'step')
    """
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "epoch"), plural(2, "epoch")
    ('1 epoch', '2 epochs')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
