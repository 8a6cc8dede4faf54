"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fathoms.train.context import Scene
from fathoms.train.guard.policy import Guard
from fathoms.train.train_state import Course

FAILED = 2
"""Exit code of a run that could not go on for a reason outside it."""
DIVERGED = 3
"""Exit code of a run whose numbers stopped being finite."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its summary as in summary.json, and the exit code."""

    summary: dict[str, Any]
    code: int


def write_end(
    scene: Scene, course: Course, guard: Guard, model: nn.Module, status: str, reason: str | None
) -> dict[str, Any]:
    """Write summary.json; what it says."""
    peak = torch.cuda.max_memory_allocated() if scene.world.device.type == "cuda" else None
    summary = {
        "status": status,
        "reason": reason,
        "best": course.best,
        "last": course.last,
        "epoch": course.epoch,
        "updates": course.updates,
        "seconds": course.seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_memory": peak,
        "guard": guard.summary(),
        "bad_images": dict(sorted(scene.data.train.stats.bad.items())),
        "folder": str(scene.folder.path),
    }
    scene.folder.write_summary(summary)
    return summary
