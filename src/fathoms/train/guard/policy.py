"""The guard's decisions about an update that is not finite or whose loss spikes: log, skip, roll back or stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fathoms.errors import FathomsError
from fathoms.train.guard.readback import UpdateReport
from fathoms.train.guard.spikes import Spikes
from fathoms.train.job import RunOptions

LR_FACTOR = 0.5
"""Each rollback multiplies the learning rate by this for the rest of the run."""
OVERFLOWS = 24
"""Updates in a row that float16's loss scaler may skip while it halves its scale."""
BAD_SHARE = 0.01
"""Share of all updates that may be skipped before the run counts as diverged."""
GUARD_COUNTS = ("skipped", "in_a_row", "overflows", "rollbacks", "jumps")
"""The guard's counters, by their names in state.json."""

Act = Literal["log", "skip", "rollback", "stop"]


class DivergedError(FathomsError):
    """The loss or a gradient is not finite; the message names the layer and the batch."""


class RollBack(Exception):  # noqa: N818 -- it does not end the run
    """Return to the last good checkpoint."""


@dataclass(frozen=True)
class Finding:
    """A bad update, and the action to take."""

    kind: Literal["not_finite", "spike"]
    act: Act
    score: float | None = None


class Guard:
    """Judges every update by its report. Pure arithmetic, so a resumed run decides as the uninterrupted one does.

    Args:
        options: The policy and its limits.
        scaled: Whether float16's loss scaler is in use; its gradients overflow now and then, and that is normal.
    """

    def __init__(self, options: RunOptions, scaled: bool = False) -> None:
        self.options, self.scaled = options, scaled
        self.spikes = Spikes()
        self.skipped = self.in_a_row = self.overflows = self.rollbacks = self.jumps = 0
        self.passed_over: set[int] = set()

    @property
    def lr_factor(self) -> float:
        """The learning rate is multiplied by this."""
        return LR_FACTOR**self.rollbacks

    def judge(self, report: UpdateReport) -> Finding | None:
        """The finding about an update, or None."""
        if report.nonfinite:
            return self._judge_nonfinite(report)
        self.in_a_row = self.overflows = 0
        score = self.spikes.score(report.loss)
        self.spikes.add(report.loss)
        if score <= self.options.spike_score:
            return None
        self.jumps += 1
        back = self.options.on_spike == "rollback" and self.rollbacks < self.options.guard_limit
        return Finding("spike", self._note_rollback(report) if back else "log", score)

    def _judge_nonfinite(self, report: UpdateReport) -> Finding | None:
        if self.scaled and abs(report.loss) < float("inf") and self.overflows < OVERFLOWS:
            self.overflows += 1
            return None
        policy, limit = self.options.guard, self.options.guard_limit
        if policy == "rollback" and self.rollbacks < limit:
            return Finding("not_finite", self._note_rollback(report))
        self.skipped += 1
        self.in_a_row += 1
        often = self.skipped > max(limit, BAD_SHARE * (report.update + 1))
        if policy != "skip" or self.in_a_row > limit or often:
            return Finding("not_finite", "stop")
        return Finding("not_finite", "skip")

    def _note_rollback(self, report: UpdateReport) -> Act:
        self.rollbacks += 1
        self.passed_over.add(report.update)
        return "rollback"

    def state_dict(self) -> dict[str, Any]:
        """Plain values for state.json."""
        counts = {name: getattr(self, name) for name in GUARD_COUNTS}
        return {**counts, "passed_over": sorted(self.passed_over), "losses": list(self.spikes.losses)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint of an earlier process."""
        for name in GUARD_COUNTS:
            setattr(self, name, saved[name])
        self.passed_over = set(saved["passed_over"])
        self.spikes = Spikes(saved["losses"])

    def roll_back(self, saved: dict[str, Any]) -> None:
        """Return to a checkpoint of this process: only the losses; the counters and the bad batches stay known."""
        self.spikes = Spikes(saved["losses"])
        self.in_a_row = self.overflows = 0

    def summary(self) -> dict[str, Any]:
        """The guard's entry in summary.json."""
        return {
            "policy": self.options.guard,
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
            "spikes": self.jumps,
            "lr_factor": self.lr_factor,
        }
