"""What a command shows while it works: a live table, a bar, and a line where work takes long."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fathoms.text_table import WIDTH, wrapped

Say = Callable[[str], None]
Show = Callable[[Sequence[tuple[str, str]]], None]


def _fitting(line: str) -> list[str]:
    """A line as lines of a terminal; what is on the way to the result is cut short.

    >>> [len(each) for each in _fitting("[0/6] running: " + "layernorm, " * 9)]
    [80]
    """
    if len(line) > WIDTH and re.match(r"\[\d+/\d+\] running: |  so far: ", line):
        return [f"{line[: WIDTH - 1]}…"]
    return wrapped(line, 4)


@contextmanager
def live_table(terminal: bool) -> Iterator[tuple[Say, Show | None]]:
    """Functions that print a line and show the rows of the table; the second is None away from a terminal."""
    if not terminal:
        yield (lambda line: print("\n".join(_fitting(line)), flush=True)), None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(rows: Sequence[tuple[str, str]]) -> None:
            table = Table.grid(padding=(0, 2))
            for name, value in rows:
                table.add_row(Text(name, style="dim"), Text(value))
            live.update(table, refresh=True)

        # Text, not markup: names of arms may have brackets.
        yield (lambda line: console.print(Text(line), soft_wrap=True)), show


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, nothing elsewhere; yields a function that takes the count so far."""
    from rich.console import Console
    from rich.progress import Progress

    # Standard output is for results only.
    shown = sys.stderr is not None and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


PATIENCE = 5.0
"""Seconds of silence before a line says what is being done."""


@contextlib.contextmanager
def announced(text: str, patience: float = PATIENCE) -> Iterator[None]:
    """Say what is being done if it takes longer than `patience` seconds; a quick refusal stays one line."""
    timer = threading.Timer(patience, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
