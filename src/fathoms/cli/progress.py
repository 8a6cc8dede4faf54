"""Progress bar of the commands: on a terminal only, on standard error."""

from __future__ import annotations

import contextlib
import sys
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
