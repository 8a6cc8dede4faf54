"""A worker process: the status it writes to shared memory, and its parent's handle to it."""

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

from fathoms.data.workers.watch import describe_trouble

# When the process began with a file, and the end of that file's name.
_STATUS = np.dtype([("since", np.float64), ("length", np.int64), ("item", np.uint8, 1008)])


class ProcessStatus:
    """Status of a worker process: written by it, read by the watch of its parent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._status = np.frombuffer(mmap.mmap(-1, _STATUS.itemsize), _STATUS)

    def begin(self, item: str) -> None:
        """Note the file that the worker reads now."""
        # The name of a file need not be valid text.
        data = np.frombuffer(item.encode(errors="backslashreplace")[-1008:], np.uint8)
        self._status["item"][0, : len(data)] = data
        self._status["length"], self._status["since"] = len(data), time.monotonic()

    @property
    def item(self) -> str:
        """The file that it reads; empty between files."""
        return bytes(self._status["item"][0, : int(self._status["length"][0])]).decode(errors="replace")

    @property
    def since(self) -> float:
        """When it began with that file; all processes share the monotonic clock."""
        return float(self._status["since"][0])


@dataclass
class ProcessHandle:
    """One worker process in its parent, and the tasks that it has not finished."""

    status: ProcessStatus
    pid: int
    pipe: Connection
    tasks: deque[tuple[int, Any, int]] = field(default_factory=deque)
    ended: bool = False
    head_since: float = 0.0
    """When the task at the head of its queue got there, in monotonic seconds."""

    def add(self, entry: tuple[int, Any, int]) -> None:
        """Note a task that was sent to it."""
        self.head_since = self.head_since if self.tasks else time.monotonic()
        self.tasks.append(entry)

    def done(self) -> int:
        """Note that the task at the head of its queue is done; returns the slot of that task."""
        self.head_since = time.monotonic()
        return self.tasks.popleft()[2]

    def trouble(self, timeout: float) -> str:
        """The fault of the process; empty if there is none."""
        self._wait()
        # A process that was stopped between two files reports none. A result that waits in the pipe proves that
        # it works.
        spent = time.monotonic() - max(self.head_since, self.status.since)
        hangs = not self.ended and self.tasks and spent > timeout and not self.pipe.poll()
        return describe_trouble(self.status.name, self.status.item, self.ended, spent if hangs else None)

    def _wait(self, options: int = os.WNOHANG) -> None:
        # A process that was waited for is gone, and its pid may belong to another.
        if not self.ended:
            try:
                self.ended = os.waitpid(self.pid, options)[0] == self.pid
            except ChildProcessError:
                self.ended = True

    def retire(self) -> None:
        """Kill it, whatever it does."""
        self.pipe.close()
        self._wait()
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            self._wait(0)
