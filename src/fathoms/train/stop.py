"""Signals: finish the step, save, and leave with the code that schedulers expect."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}


class StopRequest:
    """Remembers the first signal; the second ends the process at once. Old handlers come back on exit."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in CODES:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        code = CODES[signal.Signals(number)]
        if self.code is not None:
            os._exit(code)
        self.code = code
