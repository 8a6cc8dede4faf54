"""A watch over the ranks of a run: one that stops answering, though its connection stands, is named on standard error.

A rank that dies is noticed by its closed connection. One that is stopped, or whose machine hangs, keeps the others
waiting in silence for as long as a collective may take.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

INTERVAL = 5.0
"""Seconds between two signs of life of a rank."""
SILENCE = 30.0
"""Seconds without one after which a rank is named, and again after each further such time."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class RankWatch:
    """Counts this rank's signs of life in the store, and reads those of the others, in a thread of its own.

    Every rank watches; the lowest that is alive speaks.

    Args:
        store: The store of the process group, a connection of this thread's own.
        rank: This rank.
        size: Number of ranks.
        say: Takes a line.
    """

    def __init__(self, store: Any, rank: int, size: int, say: Callable[[str], None] = _say) -> None:
        self.store, self.rank, self.size, self.say = store, rank, size, say
        now = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {other: (0, now) for other in range(size) if other != rank}
        self._named: dict[int, float] = {}

    def beat(self, now: float) -> None:
        """Give a sign of life, and look for those of the others."""
        self.store.add(f"alive/{self.rank}", 1)
        for other, (count, _) in list(self._seen.items()):
            heard = self.store.add(f"alive/{other}", 0)
            if heard != count:
                self._seen[other] = (heard, now)
                if self._named.pop(other, None) is not None and self._speaks(now):
                    self.say(f"rank {other} answers again")
        if self._speaks(now):
            for other in self._silent(now):
                self._name(other, now)

    def _silent(self, now: float) -> list[int]:
        return [other for other, (_, last) in self._seen.items() if now - last >= SILENCE]

    def _speaks(self, now: float) -> bool:
        """Whether no lower rank is alive."""
        silent = self._silent(now)
        return all(lower in silent for lower in range(self.rank))

    def _name(self, other: int, now: float) -> None:
        if now - self._named.get(other, -SILENCE) < SILENCE:
            return
        self._named[other] = now
        self.say(
            f"rank {other} has not answered for {now - self._seen[other][1]:.0f} s: it is stopped, or its machine "
            "hangs; the others wait for it. Continue it, or end the job and give the same command again"
        )


@contextmanager
def watching(store: Any, rank: int, size: int) -> Iterator[None]:
    """Watch the other ranks while the block runs."""
    ended = threading.Event()

    def watch() -> None:
        try:
            own = store.clone()
            own.set_timeout(timedelta(seconds=2 * SILENCE))
            guard = RankWatch(own, rank, size)
            while not ended.wait(INTERVAL):
                guard.beat(time.monotonic())
        # The store is gone when a run ends or its first rank dies; that is said elsewhere.
        except RuntimeError:
            return

    thread = threading.Thread(target=watch, daemon=True, name="fathoms-ranks")
    thread.start()
    try:
        yield
    finally:
        ended.set()
