"""Plain text for terminals and notebooks: tables, names to choose from, and counts with their nouns."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence
from html import escape


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


_PIPE = re.compile(r"(?<!\\)\|")

WIDTH = 80
"""Columns of a terminal that every line should fit into."""


def wrapped(text: str, indent: int = 2) -> list[str]:
    """A sentence or a list as lines that fit a terminal, with room for a mark at their end; paths are not broken.

    >>> wrapped("word " * 20)[1]
    '  word word word word word'
    """
    how = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH - 2, subsequent_indent=" " * indent, **how) or [text]


def for_terminal(text: str) -> str:
    r"""Sentences and Markdown tables as lines that fit a terminal.

    >>> print(for_terminal("| arm | top1 |\n|---|---|\n| dyt | 71.2 |"))
    arm  top1
    dyt  71.2
    """
    lines: list[str] = []
    for is_table, block in itertools.groupby(text.splitlines(), lambda line: line.startswith("|")):
        if not is_table:
            lines += [part for line in block for part in wrapped(line, 4)]
            continue
        head, _, *rows = [[cell.strip() for cell in _PIPE.split(line.strip()[1:-1])] for line in block]
        lines += _fitting(head, rows)
    return "\n".join(lines)


def _fitting(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; of one that is too wide, without columns of zeros, and the last column below each row."""
    table = aligned(head, rows).splitlines()
    if max(map(len, table)) <= WIDTH:
        return table
    kept = [place for place in range(len(head)) if any(row[place] != "0" for row in rows)]
    head, rows = [head[place] for place in kept], [[row[place] for place in kept] for row in rows]
    table = aligned(head, rows).splitlines()
    if max(map(len, table)) <= WIDTH:
        return table
    first, *others = aligned(head[:-1], [row[:-1] for row in rows]).splitlines()
    below = [wrapped(f"    {row[-1]}", 4) if row[-1] else [] for row in rows]
    return [first, *(part for row, more in zip(others, below, strict=True) for part in (row, *more))]


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


def as_html(head: str, text: str) -> str:
    r"""A sentence above plain text, for a notebook; tables of Markdown in it become tables.

    >>> as_html("a < b", "x")
    '<p><b>a &lt; b</b></p><pre>x</pre>'
    >>> as_html("h", "| a | b |\n|---|---|\n| 1 | 2 |")
    '<p><b>h</b></p><table><tr><td>a</td><td>b</td></tr><tr><td>1</td><td>2</td></tr></table>'
    """
    parts = [f"<p><b>{escape(head)}</b></p>"]
    for is_table, lines in itertools.groupby(escape(text).splitlines(), lambda line: line.startswith("|")):
        if is_table:
            rows = [line[2:-2].split(" | ") for line in lines if not line.startswith("|---")]
            cells = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
            parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
        elif kept := "\n".join(lines).strip("\n"):
            parts.append(f"<pre>{kept}</pre>")
    return "".join(parts)
