"""Loss spikes, by a robust score that the spikes themselves do not move."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 100
"""Number of losses that a new one is compared with."""
LEAST = 20
"""Losses needed before one can be called a spike."""


class Spikes:
    """score = (loss - median) / max(1.4826 MAD, 1 % of the median), over the last hundred updates.

    Median and MAD (the median distance from it) do not follow single outliers as mean and deviation do; 1.4826
    makes the MAD of a normal distribution its standard deviation. The floor keeps a flat loss from counting its
    noise. Losses that stay high become the new median within fifty updates.

    >>> spikes = Spikes([2.0, 2.1] * 10)
    >>> round(spikes.score(2.1), 1), round(spikes.score(9.0), 1)
    (0.7, 93.8)
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self.losses: deque[float] = deque(losses, maxlen=WINDOW)

    def score(self, loss: float) -> float:
        """Robust deviations of a loss above the median; zero while too few losses are known."""
        if len(self.losses) < LEAST:
            return 0.0
        median = statistics.median(self.losses)
        spread = 1.4826 * statistics.median(abs(other - median) for other in self.losses)
        return (loss - median) / max(spread, 0.01 * abs(median), 1e-12)

    def add(self, loss: float) -> None:
        """Remember a loss."""
        self.losses.append(loss)
