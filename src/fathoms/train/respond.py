"""Carry out what the guard decides about an update: note it with its cause, then go on, roll back or stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fathoms.data import Batch
from fathoms.train.diagnose import diagnose, sentence
from fathoms.train.guard import DivergedError, Finding, RollBack
from fathoms.train.penalties import WithPenalties
from fathoms.train.watch import Seen

if TYPE_CHECKING:
    from fathoms.train.loop import Trainer


def respond(trainer: Trainer, seen: Seen, finding: Finding) -> None:
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
        row["cause"] = _cause(trainer, seen)
        why = sentence(row["cause"])
    trainer.folder.append("guard.jsonl", row)
    where = f"epoch {seen.epoch}, update {seen.update}, "
    if finding.act == "stop":
        raise DivergedError(
            f"{where}{why}; the weights are those before this step; "
            "lower --lr, or add --warmup-epochs or --clip-grad"
        )
    trainer.progress.say(f"guard: {where}{why}: {finding.act}")
    if finding.act == "rollback":
        raise RollBack


def _cause(trainer: Trainer, seen: Seen) -> dict[str, Any]:
    data = trainer.data.train
    # What has computed the update: the model, or its copies in lower precision.
    student = trainer.objective.student if trainer.copies is None else trainer.copies.module
    model = student.vit if isinstance(student, WithPenalties) else student

    def replay(step: int) -> tuple[Tensor, Batch]:
        batch = next(iter(data.epoch(seen.epoch, step)))
        return trainer.compute_loss(student, batch)[0], batch

    return diagnose(model, replay, range(*seen.steps), data.source.where, trainer.world)
