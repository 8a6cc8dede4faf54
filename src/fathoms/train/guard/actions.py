"""Act on the guard's finding: record it with its cause, then continue, roll back or stop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.train.context import RunContext
from fathoms.train.guard.locate_nonfinite import describe, locate_nonfinite
from fathoms.train.guard.policy import DivergedError, Finding, RollBack
from fathoms.train.guard.readback import UpdateReport
from fathoms.train.objective.penalties import WithPenalties


def act_on(
    finding: Finding,
    report: UpdateReport,
    context: RunContext,
    model: nn.Module,
    replay: Callable[[Batch], Tensor],
    say: Callable[[str], None],
    remark: str = "",
) -> None:
    """Append a row to guard.jsonl, print it, and raise `RollBack` or `DivergedError` where the finding asks for it.

    Args:
        finding: The guard's decision.
        report: The update it is about.
        context: The run.
        model: The module that computed the update.
        replay: Computes the loss of a batch once more.
        say: Prints a line.
        remark: What the last probe had shown, for the message of a run that stops.
    """
    row: dict[str, Any] = {
        "kind": finding.kind,
        "act": finding.act,
        # Counted from 1, as everywhere outside of the loop.
        "epoch": report.epoch + 1,
        "update": report.update + 1,
    }
    row |= {"loss": report.loss, "gradient_norm": report.norm, "score": finding.score}
    if finding.kind == "spike":
        why = f"loss {report.loss:.4g} is a spike, {finding.score:.0f} deviations above the median"
    else:
        model = model.vit if isinstance(model, WithPenalties) else model
        first, end = report.batches
        batches = itertools.islice(context.data.train.epoch(report.epoch, first), end - first)
        row["cause"] = locate_nonfinite(
            model, replay, batches, context.data.train.source.where, context.world
        )
        why = describe(row["cause"])
    context.folder.append("guard.jsonl", row)
    where = f"epoch {row['epoch']}, update {row['update']}, "
    if finding.act == "stop":
        raise DivergedError(
            f"{where}{why}{remark}; the weights are those before this update; "
            "lower --lr, or add --warmup-epochs or --clip-grad"
        )
    say(f"guard: {where}{why}: {finding.act}")
    if finding.act == "rollback":
        raise RollBack
