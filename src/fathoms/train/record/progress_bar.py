"""What a user sees while a run goes on: a live bar in a terminal, a line an epoch anywhere."""

from __future__ import annotations

import sys
from typing import Any

from fathoms.errors import printable


class Progress:
    """A bar over the images of a run; silent where there is no terminal."""

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

    def advance(self, images: int, numbers: dict[str, Any] | None = None) -> None:
        """Move the bar, and show the newest numbers where there are any."""
        if self._bar is not None:
            said = {} if numbers is None else {"numbers": "  ".join(f"{k} {v}" for k, v in numbers.items())}
            self._bar.update(self._task, advance=images, **said)

    @property
    def live(self) -> bool:
        """Whether there is a bar to show numbers in."""
        return self._bar is not None

    def rewind(self, done: int) -> None:
        """Put the bar back to `done`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self.show or sys.stderr is None:
            return
        line = printable(line)
        try:
            if self._bar is not None:
                self._bar.console.print(line, highlight=False, markup=False)
            else:
                print(line, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            # Whoever listened has gone, as `2>&1 | head` does; the run matters more than its words.
            self.show = False

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
