"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fathoms.train.loop import Trainer

FAILED = 2
"""Exit code of a run that could not go on for a reason outside it."""
DIVERGED = 3
"""Exit code of a run whose numbers stopped being finite."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its summary as in summary.json, and the exit code."""

    summary: dict[str, Any]
    code: int


def end(trainer: Trainer, status: str, code: int, reason: str | None = None) -> Outcome:
    """Write summary.json."""
    peak = torch.cuda.max_memory_allocated() if trainer.world.device.type == "cuda" else None
    summary = {
        "status": status,
        "reason": reason,
        "best": trainer.best,
        "last": trainer.last,
        "epoch": trainer.epoch,
        "updates": trainer.updates,
        "seconds": trainer.seconds,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "peak_memory": peak,
        "guard": trainer.guard.summary(),
        "bad_images": dict(sorted(trainer.data.train.stats.bad.items())),
        "folder": str(trainer.folder.path),
    }
    trainer.folder.write_summary(summary)
    return Outcome(summary, code)
