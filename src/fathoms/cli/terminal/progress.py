"""Progress of the commands, on standard error: a bar on a terminal, and a line where work takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator


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
