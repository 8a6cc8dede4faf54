"""`Probe` as a callback of Hugging Face's Trainer: `Trainer(callbacks=[Probe(every=50)])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from fathoms.integrations.probe import Probe as AnyLoop
from fathoms.probes.verdict import Verdict


class Probe(TrainerCallback):
    """Measures the signal of the depth every N updates, and ends a run at the first layer that is not finite, by name.

    Args:
        every: Updates between measurements; 0 measures none.
        gradients: Whether gradients must be finite; False with fp16=True.
    """

    def __init__(self, every: int = 100, *, gradients: bool = True) -> None:
        self.watch = AnyLoop(every, gradients=gradients)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.attach(kwargs["model"], state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise `DivergedError` before weights are touched."""
        self.watch.before_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure, if it is due, before the schedule sets the next update's rate."""
        optimizer = getattr(kwargs.get("optimizer"), "optimizer", kwargs.get("optimizer"))
        self.watch.after_step(optimizer, updates=state.global_step + 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.detach()

    def verdict(self) -> Verdict | None:
        """The trend over the second half of the measurements; None where there are fewer than four."""
        return self.watch.verdict()
