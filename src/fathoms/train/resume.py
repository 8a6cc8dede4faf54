"""A run's counters out of a checkpoint and into one, and the checks before it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fathoms.errors import ConfigError
from fathoms.train import checkpoint as checkpoints
from fathoms.train.checkpoint import Checkpoint
from fathoms.train.job import differences
from fathoms.train.state import restore

if TYPE_CHECKING:
    from fathoms.train.loop import Trainer

COUNTERS = ("epoch", "step", "updates", "best", "last", "seconds")
LINES = ("metrics.jsonl", "probe.jsonl", "guard.jsonl")


def counters(trainer: Trainer) -> dict[str, Any]:
    """What state.json keeps besides the optimizer's part."""
    return {
        **{name: getattr(trainer, name) for name in COUNTERS},
        "sums": trainer.sums.tolist(),
        "lines": {name: trainer.folder.length(name) for name in LINES},
        "guard": trainer.guard.state(),
        "identity": trainer.job.identity(),
        "data": trainer.data.fingerprint,
        "classes": list(trainer.data.classes),
    }


def go_on(trainer: Trainer) -> None:
    """Go on from the newest whole checkpoint, if there is one and the run is the same."""
    folder = checkpoints.newest(trainer.folder.checkpoints)
    if folder is None:
        return
    if trainer.job.run.resume == "never":
        raise ConfigError(
            f"{trainer.folder.path}: holds a run already; choose another --experiment or --resume auto"
        )
    kept = checkpoints.read(folder)
    check_same_run(trainer, kept)
    take_over(trainer, kept, str(folder))
    trainer.guard.load(kept.state["guard"])
    for name, length in kept.state["lines"].items():
        trainer.folder.cut(name, length)


def check_same_run(trainer: Trainer, kept: Checkpoint) -> None:
    """Refuse a checkpoint of other settings or other data, with the difference."""
    where = trainer.folder.path
    changed = differences(kept.state["identity"], trainer.job.identity())
    if changed:
        raise ConfigError(f"{where}: holds a run with other settings ({'; '.join(changed)})")
    if kept.state["data"] != trainer.data.fingerprint:
        raise ConfigError(f"{where}: the data set has changed since this run began")


def take_over(trainer: Trainer, kept: Checkpoint, where: str) -> None:
    """Weights, moments, averages and counters of a checkpoint."""
    restore(kept, trainer.model, trainer.optimizer, trainer.ema, trainer.scaler, where)
    for name in COUNTERS:
        setattr(trainer, name, kept.state[name])
    trainer.sums.copy_(torch.tensor(kept.state["sums"], dtype=torch.float64))
    trainer.fresh.zero_()


def roll_back(trainer: Trainer) -> str:
    """Put the last good checkpoint back in the middle of a run; the guard's own record goes on."""
    folder = checkpoints.newest(trainer.folder.checkpoints)
    if folder is None:
        raise ConfigError(f"{trainer.folder.path}: no checkpoint to roll back to; it was removed")
    kept = checkpoints.read(folder)
    take_over(trainer, kept, str(folder))
    trainer.guard.roll_back(kept.state["guard"])
    trainer.optimizer.zero_grad(set_to_none=True)
    for name, length in kept.state["lines"].items():
        if name != "guard.jsonl":
            trainer.folder.cut(name, length)
    return f"back at epoch {trainer.epoch}, update {trainer.updates}"
