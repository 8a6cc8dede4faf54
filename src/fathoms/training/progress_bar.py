"""The progress of a run: one live line in a terminal, elsewhere a line at least every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fathoms.errors import printable

EVERY = 10.0
"""Seconds of silence after which a line is printed where there is no terminal."""
WIDE = 80
"""Columns of a line where there is no terminal."""
BAR, SHORTEST = 24, 6
"""Most and fewest characters of the bar."""


def clock(seconds: float | None) -> str:
    """A time as people read it on a clock.

    >>> clock(7384), clock(61.2), clock(None)
    ('2:03:04', '1:01', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def fit(width: int, share: float, left: str, numbers: Mapping[str, str]) -> tuple[int, str]:
    """The line for a terminal of `width` columns: the length of its bar, and the text after it.

    Share and time left are always whole; the numbers that do not fit are left out, the last first, and the bar
    takes what remains.

    >>> fit(40, 0.5, "1:02", {"epoch": "3/9", "loss": "1.250", "images/s": "1,024"})
    (0, ' 50%  1:02 left  epoch 3/9  loss 1.250')
    """
    text = f"{share:4.0%}  {left} left"
    for name, value in numbers.items():
        longer = f"{text}  {name} {value}"
        if len(longer) > width:
            break
        text = longer
    bar = min(BAR, width - len(text) - 1)
    return (bar if bar >= SHORTEST else 0), text


class Progress:
    """Printed lines, and how far a run has come."""

    def __init__(
        self,
        total: int,
        show: bool,
        done: Callable[[], int] = lambda: 0,
        numbers: Callable[[], dict[str, str]] = dict,
        every: float | None = None,
    ) -> None:
        self.total, self.show, self.done, self.numbers = total, show, done, numbers
        self.every = EVERY if every is None else every
        self.activity = ""
        self._first, self._began = done(), time.monotonic()
        self._said = self._began
        self._live: Any = None
        self._unicode = True
        self._closed = threading.Event()
        if not show or sys.stderr is None:
            return
        if sys.stderr.isatty():
            self._start_live()
        else:
            threading.Thread(target=self._break_silence, daemon=True).start()

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # A file of its own: while the line is live, sys.stderr is a proxy that prints above it.
        console = Console(file=sys.stderr)
        self._unicode = console.encoding.startswith("utf")
        self._live = Live(
            get_renderable=lambda: self._render(console.width),
            console=console,
            refresh_per_second=4,
            transient=True,
        )
        self._live.start()

    def _render(self, width: int) -> Any:
        from rich.text import Text

        share = self.share
        numbers = {**self.numbers(), **({"": self.activity} if self.activity else {})}
        # The last column stays free: some terminals break a line that fills it.
        bar, text = fit(width - 1, share, clock(self.left), numbers)
        filled = round(bar * share)
        mark = "━" if self._unicode else "#"
        line = Text(no_wrap=True, overflow="crop")
        line.append(mark * filled, "cyan").append((mark if self._unicode else "-") * (bar - filled), "dim")
        return line.append(f" {text}" if bar else text)

    def _break_silence(self) -> None:
        """Print a line whenever nothing has been printed for a while; the device is not asked for anything."""
        while not self._closed.wait(max(0.01, self._said + self.every - time.monotonic())):
            if time.monotonic() - self._said >= self.every:
                self.say(self.line())

    @property
    def left(self) -> float | None:
        """Seconds until the end at the speed of this process so far; None before its first batch."""
        now = self.done()
        # A rollback may go back to before this process began.
        self._first = min(self._first, now)
        if now == self._first:
            return None
        return (time.monotonic() - self._began) / (now - self._first) * (self.total - now)

    def line(self) -> str:
        """How far the run has come, in one line."""
        shown, activity = self.numbers(), f"  {self.activity}" if self.activity else ""
        begun = "" if shown else f"  no update yet, {clock(time.monotonic() - self._began)} since the start"
        _, text = fit(WIDE - len(activity), self.share, clock(self.left), shown)
        return f"{text.strip()}{begun}{activity}"

    @property
    def share(self) -> float:
        return self.done() / max(self.total, 1)

    def say(self, line: str) -> None:
        self._said = time.monotonic()
        if not self.show or sys.stderr is None:
            return
        line = printable(line)
        try:
            if self._live is not None:
                self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)
            else:
                print(line, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            # The reader has gone, as in `2>&1 | head`; the run continues in silence.
            self.show = False

    def close(self) -> None:
        """Remove the live line, and print no more lines unasked."""
        self._closed.set()
        if self._live is not None:
            self._live.stop()
            self._live = None
