"""What to do about an update whose numbers are not finite, or whose loss jumps: stop, skip or roll back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fathoms.errors import FathomsError
from fathoms.train.checkpoint.migrate import GUARD_COUNTS
from fathoms.train.guard.readback import Seen
from fathoms.train.guard.spikes import Spikes
from fathoms.train.job import RunOptions

LR_FACTOR = 0.5
"""What each rollback multiplies the learning rate with, for the rest of the run."""
OVERFLOWS = 24
"""Updates in a row that float16's scaler may lose while it looks for its scale; it halves it each time."""
BAD_SHARE = 0.01
"""Share of all updates that may be skipped before the run counts as diverged."""

Act = Literal["log", "skip", "rollback", "stop"]


class DivergedError(FathomsError):
    """The loss or a gradient is not finite; the message names the layer and the batch."""


class RollBack(Exception):  # noqa: N818 -- it ends no run
    """Go back to the last good checkpoint."""


@dataclass(frozen=True)
class Finding:
    """An update that is not as it should be, and what happens now."""

    kind: Literal["not_finite", "spike"]
    act: Act
    score: float | None = None


class Guard:
    """Judges each update by what the host has seen of it; pure arithmetic, so that a resumed run judges alike.

    Args:
        options: The policy and its limits.
        scaled: Whether a scaler of float16 is at work, for which a gradient that overflows is an everyday event.
    """

    def __init__(self, options: RunOptions, scaled: bool = False) -> None:
        self.options, self.scaled = options, scaled
        self.spikes = Spikes()
        self.skipped = self.in_a_row = self.overflows = self.rollbacks = self.jumps = 0
        self.passed_over: set[int] = set()

    @property
    def lr_factor(self) -> float:
        """What the learning rate is multiplied with."""
        return LR_FACTOR**self.rollbacks

    def judge(self, seen: Seen) -> Finding | None:
        """What is wrong with an update, or None."""
        if seen.held:
            return self._judge_held(seen)
        self.in_a_row = self.overflows = 0
        score = self.spikes.score(seen.loss)
        self.spikes.add(seen.loss)
        if score <= self.options.spike_score:
            return None
        self.jumps += 1
        back = self.options.on_spike == "rollback" and self.rollbacks < self.options.guard_limit
        return Finding("spike", self._note_rollback(seen) if back else "log", score)

    def _judge_held(self, seen: Seen) -> Finding | None:
        if self.scaled and abs(seen.loss) < float("inf") and self.overflows < OVERFLOWS:
            self.overflows += 1
            return None
        policy, limit = self.options.guard, self.options.guard_limit
        if policy == "rollback" and self.rollbacks < limit:
            return Finding("not_finite", self._note_rollback(seen))
        self.skipped += 1
        self.in_a_row += 1
        often = self.skipped > max(limit, BAD_SHARE * (seen.update + 1))
        if policy != "skip" or self.in_a_row > limit or often:
            return Finding("not_finite", "stop")
        return Finding("not_finite", "skip")

    def _note_rollback(self, seen: Seen) -> Act:
        self.rollbacks += 1
        self.passed_over.add(seen.update)
        return "rollback"

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        counts = {name: getattr(self, name) for name in GUARD_COUNTS}
        return {**counts, "passed_over": sorted(self.passed_over), "losses": list(self.spikes.losses)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of an earlier process."""
        for name in GUARD_COUNTS:
            setattr(self, name, state[name])
        self.passed_over = set(state["passed_over"])
        self.spikes = Spikes(state["losses"])

    def roll_back(self, state: dict[str, Any]) -> None:
        """Go back to a checkpoint of this process: only the losses; what was learnt of bad batches stays."""
        self.spikes = Spikes(state["losses"])
        self.in_a_row = self.overflows = 0

    def summary(self) -> dict[str, Any]:
        """What summary.json says of it."""
        return {
            "policy": self.options.guard,
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
            "spikes": self.jumps,
            "lr_factor": self.lr_factor,
        }
