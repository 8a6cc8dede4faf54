"""A live table under the lines that a command prints, on a terminal; elsewhere lines alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Say = Callable[[str], None]
Show = Callable[[Sequence[tuple[str, str]]], None]


@contextmanager
def live_table(terminal: bool) -> Iterator[tuple[Say, Show | None]]:
    """Functions that print a line and show the rows of the table; the second is None away from a terminal."""
    if not terminal:
        yield (lambda line: print(line, flush=True)), None
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
