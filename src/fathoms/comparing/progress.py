"""Progress of a comparison: a line for every cell that ends; between them a live table, or a line every ten seconds."""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from fathoms.comparing.folder import ENDED, Cell, ComparisonFolder
from fathoms.untrusted import read_lines

EVERY = 10.0
"""Seconds between lines while nothing ends."""
REFRESH = 1.0
"""Seconds between states of a live table."""

Rows = list[tuple[str, str]]
Show = Callable[[Rows], None]


class Progress:
    """Notified of every cell; keeps its outcome and prints a line.

    Args:
        folder: Where failures are noted and checkpoints pruned.
        workers: Cells at a time.
        keep: Which checkpoints of an ended cell stay: none, last or all.
        say: Takes a line for the user.
        refresh: Called after each cell that ended, to gather results.
        show: Takes the rows of a live table every second; None prints lines instead.
    """

    def __init__(
        self,
        folder: ComparisonFolder,
        workers: int,
        keep: str,
        say: Callable[[str], None],
        refresh: Callable[[], str],
        show: Show | None = None,
    ) -> None:
        self.folder, self.workers, self.keep, self.refresh = folder, workers, keep, refresh
        self._print, self._show, self.answer = say, show, ""
        self.ahead: list[Cell] = []
        """Cells that have not ended, those under way and those that may follow among them."""
        self.running: dict[str, float] = {}
        self.rates: dict[str, list[float]] = {}
        """By architecture, seconds of an epoch of each cell that ended."""
        self.ended_cells = self.failed_cells = 0
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._tick, daemon=True).start()

    @property
    def total(self) -> int:
        """Cells that ended, and those ahead."""
        return self.ended_cells + len(self.ahead)

    def began(self, cell: Cell) -> None:
        with self._lock:
            self.running[cell.folder.name] = time.monotonic()

    def ended(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep the outcome of a cell, and print it."""
        with self._lock:
            self.running.pop(cell.folder.name, None)
            status = result["status"]
            if status == "interrupted":
                return
            self.ahead = [other for other in self.ahead if other.folder != cell.folder]
            self.seconds[cell.folder.name] = seconds = result.get("wall_seconds", 0.0)
            if status == "done" and seconds:
                self.rates.setdefault(cell.architecture, []).append(seconds / cell.job.recipe.total_epochs)
            if status == "failed":
                self.folder.note_failure(cell, str(result.get("reason")))
                self.failed_cells += 1
            elif status in ENDED:
                self.folder.forget_failure(cell)
                self.folder.prune(cell, self.keep)
            self.ended_cells += 1
            self.answer = self.refresh()
            reason = f": {result['reason']}" if result.get("reason") else ""
            self.say(
                f"{self._count()} {cell.arm}, seed {cell.seed}: {status}{self._score(cell)}{reason}{self._left()}"
            )
            if self.answer and self._show is None:
                self.say(f"  {self.answer}")

    def say(self, line: str) -> None:
        """A line for the user; a terminal that is gone ends no run."""
        with contextlib.suppress(OSError, ValueError):
            self._print(line)

    def close(self) -> None:
        """No further lines."""
        self._closed.set()

    def timings(self, cells: Sequence[Cell]) -> str:
        """timings.json: seconds, images per second and memory of each cell, which may differ between two runs."""
        before = self.folder.timings()
        rows = {}
        for cell in cells:
            status = self.folder.status(cell)
            if status.get("status") in ENDED:
                rows[cell.folder.name] = {
                    "training_seconds": status.get("seconds"),
                    "wall_seconds": self.seconds.get(
                        cell.folder.name, before.get(cell.folder.name, {}).get("wall_seconds")
                    ),
                    "images_per_second": self._rate(cell),
                    "peak_memory": status.get("peak_memory"),
                }
        return json.dumps(rows, indent=1) + "\n"

    def _rate(self, cell: Cell) -> float | None:
        """Images per second of the last epoch."""
        rows = read_lines(cell.folder / "metrics.jsonl")
        rates = [row.get("images_per_second") for row in rows if row.get("split") == "train"]
        return rates[-1] if rates else None

    def _score(self, cell: Cell) -> str:
        status = self.folder.status(cell)
        measured = status.get("test") or status.get("last")
        return f" {measured['top1']:.2f} %" if measured else ""

    def _count(self) -> str:
        failed = f", {self.failed_cells} failed" if self.failed_cells else ""
        return f"[{self.ended_cells}/{self.total}{failed}]"

    def _left(self) -> str:
        """The time that the cells ahead take, each that of its epochs at the rate of its architecture."""
        every = [rate for rates in self.rates.values() for rate in rates]
        if not (every and self.ahead):
            return ""
        now, seconds = time.monotonic(), 0.0
        for cell in self.ahead:
            rate = statistics.fmean(self.rates.get(cell.architecture, every))
            spent = now - self.running.get(cell.folder.name, now)
            seconds += max(0.0, rate * cell.job.recipe.total_epochs - spent)
        return f"  about {span(seconds / min(self.workers, len(self.ahead)))} left"

    def rows(self) -> Rows:
        """The live table: done, failed, running, time left, and the leader with its interval."""
        now = time.monotonic()
        return [
            ("done", f"{self.ended_cells - self.failed_cells} of {self.total}"),
            ("failed", str(self.failed_cells)),
            ("running", "\n".join(f"{name}  {span(now - since)}" for name, since in self.running.items())),
            ("left", self._left().strip().removesuffix(" left") or "not known yet"),
            ("leader", self.answer or "no run has ended yet"),
        ]

    def _tick(self) -> None:
        while not self._closed.wait(EVERY if self._show is None else REFRESH):
            with self._lock:
                if self._show is not None:
                    with contextlib.suppress(OSError, ValueError):
                        self._show(self.rows())
                elif self.running:
                    now = time.monotonic()
                    names = ", ".join(f"{name} {span(now - since)}" for name, since in self.running.items())
                    self.say(f"{self._count()} running: {names}")


def span(seconds: float) -> str:
    """A time as people say it.

    >>> span(75.0)
    '1 min 15 s'
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
