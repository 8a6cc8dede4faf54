"""The guard: judges every update, and logs, skips, rolls back or stops at one that is not finite or whose loss spikes.

A bad update is run again to find the first layer whose output or gradient is not finite. The weights are still those
before it, and its batches and random numbers follow from counters, so it is the same.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.errors import FathomsError
from fathoms.parts.modes import hooked
from fathoms.training.distributed import World, gather_objects, own_part
from fathoms.training.job import RunOptions
from fathoms.training.learner import RunContext
from fathoms.training.penalties import WithPenalties
from fathoms.training.step import UpdateReport

WINDOW = 100
"""Number of losses that a new one is compared with."""
LEAST = 20
"""Losses needed before one can be called a spike."""


class Spikes:
    """score = (loss - median) / max(1.4826 MAD, 1 % of the median), over the last hundred updates.

    Median and MAD (the median distance from it) do not follow single outliers as mean and deviation do; 1.4826
    makes the MAD of a normal distribution its standard deviation. The floor keeps a flat loss from counting its
    noise. Losses that stay high become the new median within fifty updates.

    >>> spikes = Spikes([2.0, 2.1] * 10)
    >>> round(spikes.score(2.1), 1), round(spikes.score(9.0), 1)
    (0.7, 93.8)
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self.losses: deque[float] = deque(losses, maxlen=WINDOW)

    def score(self, loss: float) -> float:
        """Robust deviations of a loss above the median; zero while too few losses are known."""
        if len(self.losses) < LEAST:
            return 0.0
        median = statistics.median(self.losses)
        spread = 1.4826 * statistics.median(abs(other - median) for other in self.losses)
        return (loss - median) / max(spread, 0.01 * abs(median), 1e-12)

    def add(self, loss: float) -> None:
        self.losses.append(loss)


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
    """Judges every update by its report. Pure arithmetic, so a resumed run decides as the uninterrupted one does."""

    def __init__(self, options: RunOptions, scaled: bool = False) -> None:
        self.options, self.scaled = options, scaled
        self.spikes = Spikes()
        self.skipped = self.in_a_row = self.overflows = self.rollbacks = self.jumps = 0
        self.passed_over: set[int] = set()

    @property
    def lr_factor(self) -> float:
        return LR_FACTOR**self.rollbacks

    def judge(self, report: UpdateReport) -> Finding | None:
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


def locate_nonfinite(
    model: nn.Module,
    replay: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    where: Callable[[int], str],
    world: World,
) -> dict[str, Any]:
    """The batch, rank, loss, files and first bad layer, gradient or norm of a bad update, for guard.jsonl."""
    found: dict[str, Any] | None = None
    report: dict[str, Any] = {}
    with _restoring(model):
        for batch in batches:
            with _first_bad_output(model) as outputs:
                loss = replay(batch)
            bad_loss = not bool(loss.isfinite())
            with _first_bad_gradient(model) as gradients:
                loss.backward()
            gradient = gradients[0] if gradients else bad_gradient(model)
            overflow = None if gradient else overflowing_gradient(model)
            files = [where(int(index)) for index in batch.ids]
            # "step" is the batch's number in guard.jsonl, whose readers know it by that name.
            report = {"step": batch.number, "rank": world.rank, "loss": float(loss.detach()), "files": files}
            report |= {"layer": outputs[0] if outputs else None, "gradient": gradient, "overflow": overflow}
            if found is None and (outputs or bad_loss or gradient or overflow):
                found = report
    reports = [other for other in gather_objects(world, found) if other is not None]
    # DDP averages a bad gradient over all ranks; a bad layer or loss is where it came from.
    reports.sort(key=lambda other: (other["layer"] is None, other["loss"] - other["loss"] == 0))
    return reports[0] if reports else {**report, "step": None}


@contextlib.contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Clear the gradients, and put them and the buffers back at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextlib.contextmanager
def _first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """A list that receives the name of the first module, in order of execution, whose output is not finite."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if not found and not all(
                bool(part.isfinite().all()) for part in parts if isinstance(part, Tensor)
            ):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    with hooked(*hooks):
        yield found


@contextlib.contextmanager
def _first_bad_gradient(model: nn.Module) -> Iterator[list[str]]:
    """A list that receives, in the order of the backward pass, the parameters whose gradient is not finite."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                found.append(name)

        return hook

    own = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(look(name)) for name, parameter in own]
    with hooked(*hooks):
        yield found


def bad_gradient(model: nn.Module) -> str | None:
    """A parameter whose gradient is not finite, or None; FSDP sets gradients outside of the hooks above."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and not bool(own_part(gradient).isfinite().all()):
            return name
    return None


def overflowing_gradient(model: nn.Module) -> str | None:
    """The parameter with the largest gradient, where the norm of the whole is beyond float32; else None.

    Every value may be finite: the norm adds up their squares.
    """
    own = {name: own_part(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    if not own or bool(nn.utils.get_total_norm(list(own.values())).isfinite()):
        return None
    return max(own, key=lambda name: float(own[name].abs().max()) if own[name].numel() else 0.0)


def describe(cause: dict[str, Any]) -> str:
    """The cause as part of a sentence: batch, loss, layer and files."""
    if cause["layer"] is not None:
        what = f"first in the output of {cause['layer']}"
    elif cause["gradient"] is not None:
        what = f"in the gradient of {cause['gradient']}, after a finite forward pass"
    elif cause.get("overflow") is not None:
        what = f"in the norm of the gradient, which is largest in {cause['overflow']}, after a finite forward pass"
    else:
        what = "in the loss alone" if cause["step"] is not None else "but finite when run again"
    files = cause["files"]
    listed = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    batch = "" if cause["step"] is None else f"batch {cause['step']}, rank {cause['rank']}: "
    return f"{batch}not a finite number (loss {cause['loss']:g}), {what}; the batch was {listed}"


def act_on(
    finding: Finding,
    report: UpdateReport,
    context: RunContext,
    model: nn.Module,
    replay: Callable[[Batch], Tensor],
    say: Callable[[str], None],
    remark: str = "",
) -> None:
    """Append a row to guard.jsonl, print it, and raise `RollBack` or `DivergedError` where the finding asks for it."""
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
