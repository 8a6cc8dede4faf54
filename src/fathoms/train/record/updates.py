"""Loss and gradient norm of every update, as rows of updates.jsonl that hold many updates each."""

from __future__ import annotations

from collections import deque

from fathoms.train.record.run_folder import RunFolder

FILE = "updates.jsonl"
ROW = 100
"""Updates of a row; fewer before a checkpoint, at a gap and at the end."""


class UpdateLog:
    """Collects what the guard reads anyway, so that recording costs the device nothing.

    Args:
        folder: The run folder that gets the rows.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.first, self.losses, self.norms = 0, list[float](), list[float]()
        self._latest: deque[float] = deque(maxlen=20)
        self._norm: float | None = None

    def add(self, update: int, loss: float, norm: float) -> None:
        """Note update number `update`, counted from 1."""
        if self.losses and (update != self.first + len(self.losses) or len(self.losses) >= ROW):
            self.flush()
        if not self.losses:
            self.first = update
        # Five digits are more than a chart shows.
        self.losses.append(float(f"{loss:.5g}"))
        self.norms.append(float(f"{norm:.5g}"))
        self._latest.append(loss)
        self._norm = norm

    def flush(self) -> None:
        """Write what has been noted."""
        if self.losses:
            self.folder.append(FILE, {"update": self.first, "loss": self.losses, "gradient_norm": self.norms})
        self.clear()

    def clear(self) -> None:
        """Drop what has been noted and not written: those updates are done again."""
        self.losses, self.norms = [], []

    def live(self) -> dict[str, str]:
        """The gradient norm of the latest update, before it is clipped, for the progress line."""
        return {} if self._norm is None else {"grad norm": f"{self._norm:.3g}"}

    def recent(self) -> float | None:
        """Mean loss of the latest updates; None before the first."""
        return sum(self._latest) / len(self._latest) if self._latest else None
