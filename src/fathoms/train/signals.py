"""Signals: finish the step, save, and leave with the code that schedulers expect."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}

# What each process adds to the sum over all of them; no sum of the first kind reaches one of the second.
VOTES = {None: 0, 130: 1, 143: 1 << 20}


# Seconds. Who signals a whole job reaches torchrun and its ranks, to which torchrun then sends the same once more.
ECHO = 2.0
LAUNCHED = "TORCHELASTIC_RUN_ID"


class StopRequest:
    """Remembers the first signal; the second ends the process at once, unless it is torchrun's echo of the first.

    Old handlers come back on exit.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._first = (0, 0.0)
        self.agreed: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            # Python lets only the main thread take signals; elsewhere the caller decides.
            return self
        for number in CODES:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def vote(self) -> int:
        """This process's part of what all of them must agree on, for they must stop after the same update."""
        return VOTES[self.code]

    def agree(self, votes: int) -> None:
        """Take note of the sum of all votes."""
        if votes and self.agreed is None:
            self.agreed = 143 if votes >= VOTES[143] else 130

    def _note(self, number: int, _frame: FrameType | None) -> None:
        code, now = CODES[signal.Signals(number)], time.monotonic()
        if self.code is None:
            self.code, self._first = code, (number, now)
            return
        kind, began = self._first
        if LAUNCHED not in os.environ or number != kind or now - began > ECHO:
            os._exit(code)
