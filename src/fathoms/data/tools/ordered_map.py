"""Map a function over items in several threads: results in order, a bounded number in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from itertools import islice
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

# Enough to keep the threads busy, few enough that memory stays bounded.
WINDOW = 128


def ordered_map(pool: Executor, work: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """Yield the result for each item, in order."""
    left = iter(items)
    waiting = deque(pool.submit(work, item) for item in islice(left, WINDOW))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(pool.submit(work, item) for item in islice(left, 1))
