"""Signals to a comparison: the first lets the workers save and end, the second ends everything at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Protocol, runtime_checkable

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@runtime_checkable
class Stoppable(Protocol):
    """Work that a signal stops."""

    def stop(self) -> None:
        """Start nothing further; what is under way saves and ends."""

    def kill(self) -> None:
        """End everything at once."""


class PassSignals:
    """Pass SIGINT, SIGTERM and SIGHUP on to the workers; gives the list of those that came.

    One that is ignored from the start, as `nohup` does with SIGHUP, stays ignored.
    """

    def __init__(self, runner: Stoppable) -> None:
        self.runner, self.came = runner, list[int]()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> list[int]:
        if threading.current_thread() is threading.main_thread():
            for number in HEARD:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self.came

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
        if len(self.came) > 1:
            self.runner.kill()
            os._exit(128 + number)
        self.runner.stop()
