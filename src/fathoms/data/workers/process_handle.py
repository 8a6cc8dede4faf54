"""A worker process: what it tells of itself, and how its parent sees it."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

# What a process tells of itself: when it began with a file, and the end of that file's name.
_STATUS = np.dtype([("since", np.float64), ("length", np.int64), ("item", np.uint8, 1008)])


class Reporter:
    """What a worker is doing: written by it, read by the watch of another process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._status = np.frombuffer(mmap.mmap(-1, _STATUS.itemsize), _STATUS)

    def begin(self, item: str) -> None:
        """Note the file the worker turns to now."""
        # The name of a file need not be text.
        data = np.frombuffer(item.encode(errors="backslashreplace")[-1008:], np.uint8)
        self._status["item"][0, : len(data)] = data
        self._status["length"], self._status["since"] = len(data), time.monotonic()

    @property
    def item(self) -> str:
        """The file it is at; empty between files."""
        return bytes(self._status["item"][0, : int(self._status["length"][0])]).decode(errors="replace")

    @property
    def since(self) -> float:
        """When it began with that file; all processes share this clock."""
        return float(self._status["since"][0])


@dataclass
class Child:
    """One process as its parent sees it, and the tasks it has not done yet."""

    reporter: Reporter
    pid: int
    pipe: Connection
    tasks: deque[tuple[int, Any, int]] = field(default_factory=deque)
    ended: bool = False
    given: float = 0.0
    """When the first of its tasks came to be the first."""

    def add(self, entry: tuple[int, Any, int]) -> None:
        """Note a task that it is sent."""
        self.given = self.given if self.tasks else time.monotonic()
        self.tasks.append(entry)

    def done(self) -> int:
        """Note that the first of its tasks is done; its slot."""
        self.given = time.monotonic()
        return self.tasks.popleft()[2]

    def trouble(self, timeout: float) -> str:
        """What is wrong with it; empty if nothing is."""
        where = f"at {self.reporter.item or 'no file'}"
        self._look()
        if self.ended:
            return f"{self.reporter.name} died {where}"
        # One that is stopped between two files tells of none. A result that lies in the pipe says more than silence.
        spent = time.monotonic() - max(self.given, self.reporter.since)
        if self.tasks and spent > timeout and not self.pipe.poll():
            return f"{self.reporter.name} has hung for {spent:.1f} s {where}"
        return ""

    def _look(self, how: int = os.WNOHANG) -> None:
        # A process that has been waited for is no more, and its number may be another's.
        if not self.ended:
            try:
                self.ended = os.waitpid(self.pid, how)[0] == self.pid
            except ChildProcessError:
                self.ended = True

    def kill(self) -> None:
        """End it, whatever it does."""
        self.pipe.close()
        self._look()
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            self._look(0)
