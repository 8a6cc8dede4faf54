"""Signals, also of a closed terminal: finish the update, save, and exit with the code that schedulers expect."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGHUP: 143}

# Each rank's vote; they are summed. SIGINT counts 1 and SIGTERM 2**20, so that fewer than 2**20 SIGINTs never look
# like a SIGTERM.
VOTES = {None: 0, 130: 1, 143: 1 << 20}

# Seconds. A signal to a whole job reaches torchrun and its ranks, and torchrun then forwards it to the ranks again.
ECHO = 2.0
LAUNCHED = "TORCHELASTIC_RUN_ID"


class StopRequest:
    """Remembers the first signal; the second ends the process at once, unless it is torchrun's echo of the first.

    Leaving the block restores the old handlers.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._first = (0, 0.0)
        self.agreed: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            # Python allows signal handlers in the main thread only.
            return self
        for number in CODES:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                # `nohup` asks for a run that outlives its terminal.
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def vote(self) -> int:
        """This rank's vote; all ranks must stop after the same update."""
        return VOTES[self.code]

    def agree(self, votes: int) -> None:
        """Receive the sum of all votes, which is not zero."""
        if self.agreed is None:
            self.agreed = 143 if votes >= VOTES[143] else 130

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        code, now = CODES[signal.Signals(number)], time.monotonic()
        if self.code is None:
            self.code, self._first = code, (number, now)
            return
        kind, began = self._first
        if LAUNCHED not in os.environ or number != kind or now - began > ECHO:
            os._exit(code)
