"""Carry out what the guard decides about an update: note it with its cause, then go on, roll back or stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fathoms.data import Batch
from fathoms.train.context import Scene
from fathoms.train.guard.locate_nonfinite import diagnose, sentence
from fathoms.train.guard.policy import DivergedError, Finding, RollBack
from fathoms.train.guard.readback import Seen
from fathoms.train.objective.penalties import WithPenalties
from fathoms.train.step import Stepper


def respond(scene: Scene, stepper: Stepper, seen: Seen, finding: Finding, say: Callable[[str], None]) -> None:
    """Append to guard.jsonl, say it, and raise what the decision asks for."""
    row: dict[str, Any] = {
        "kind": finding.kind,
        "act": finding.act,
        "epoch": seen.epoch,
        "update": seen.update,
    }
    row |= {"loss": seen.loss, "gradient_norm": seen.norm, "score": finding.score}
    if finding.kind == "spike":
        why = f"loss {seen.loss:.4g} is a spike, {finding.score:.0f} deviations above the median"
    else:
        row["cause"] = _cause(scene, stepper, seen)
        why = sentence(row["cause"])
    scene.folder.append("guard.jsonl", row)
    where = f"epoch {seen.epoch}, update {seen.update}, "
    if finding.act == "stop":
        raise DivergedError(
            f"{where}{why}; the weights are those before this step; "
            "lower --lr, or add --warmup-epochs or --clip-grad"
        )
    say(f"guard: {where}{why}: {finding.act}")
    if finding.act == "rollback":
        raise RollBack


def _cause(scene: Scene, stepper: Stepper, seen: Seen) -> dict[str, Any]:
    data, student = scene.data.train, stepper.computing
    model = student.vit if isinstance(student, WithPenalties) else student

    def replay(step: int) -> tuple[Tensor, Batch]:
        batch = next(iter(data.epoch(seen.epoch, step)))
        return stepper.loss(student, batch), batch

    return diagnose(model, replay, range(*seen.steps), data.source.where, scene.world)
