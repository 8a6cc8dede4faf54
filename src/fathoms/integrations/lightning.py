"""`Probe` as a callback of Lightning: `Trainer(callbacks=[Probe(every=50)])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from fathoms.errors import ConfigError
from fathoms.integrations.probe import Probe as AnyLoop
from fathoms.integrations.probe import labels_in
from fathoms.probes.verdict import Verdict


class Probe(Callback):
    """Logs the signal of the depth every N updates, and ends a run at the first layer that is not finite, by name.

    Args:
        every: Updates between measurements; 0 measures none.
        module: Name of the part of the LightningModule that its training step calls with images, such as "model"; None
            is the whole.
        gradients: Whether gradients must be finite; False with precision="16-mixed".
    """

    def __init__(self, every: int = 100, *, module: str | None = None, gradients: bool = True) -> None:
        self.watch, self.module = AnyLoop(every, gradients=gradients), module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.module is not None and not hasattr(pl_module, self.module):
            raise ConfigError(f"module={self.module!r}: {type(pl_module).__name__} has no such part")
        watched = getattr(pl_module, self.module) if self.module else pl_module
        self.watch.attach(watched, trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Raise `DivergedError` before weights are touched."""
        self.watch.before_step()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure, if an update was made and a measurement is due."""
        if trainer.global_step == self.watch.updates:
            return
        signal = self.watch.after_step(trainer.optimizers[0], labels_in(batch), updates=trainer.global_step)
        if signal is not None and trainer.logger is not None:
            rows = {"fathoms/growth": signal.growth, "fathoms/gradient_ratio": signal.gradient_ratio}
            trainer.logger.log_metrics(rows, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.watch.detach()

    def verdict(self) -> Verdict | None:
        """The trend over the second half of the measurements; None where there are fewer than four."""
        return self.watch.verdict()
