"""The progress of a run: a live bar in a terminal, and one line per epoch everywhere."""

from __future__ import annotations

import sys
from typing import Any

from fathoms.errors import printable


class Progress:
    """A bar over the batches of a run, and printed lines; no bar where there is no terminal.

    Args:
        total: Batches of the run.
        done: Batches already done.
        show: Whether to print anything.
    """

    def __init__(self, total: int, done: int, show: bool) -> None:
        self._bar: Any = None
        self.show = show
        if show and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                TextColumn("{task.fields[numbers]}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), refresh_per_second=4)
            self._task = self._bar.add_task("train", total=total, completed=done, numbers="")
            self._bar.start()

    def advance(self, batches: int, numbers: dict[str, Any] | None = None) -> None:
        """Move the bar, and show the numbers if given."""
        if self._bar is not None:
            fields = {} if numbers is None else {"numbers": "  ".join(f"{k} {v}" for k, v in numbers.items())}
            self._bar.update(self._task, advance=batches, **fields)

    @property
    def live(self) -> bool:
        """Whether there is a bar to show numbers in."""
        return self._bar is not None

    def rewind(self, done: int) -> None:
        """Put the bar back to `done`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def say(self, line: str) -> None:
        """Print a line."""
        if not self.show or sys.stderr is None:
            return
        line = printable(line)
        try:
            if self._bar is not None:
                self._bar.console.print(line, highlight=False, markup=False)
            else:
                print(line, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            # The reader has gone, as in `2>&1 | head`; the run continues in silence.
            self.show = False

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
