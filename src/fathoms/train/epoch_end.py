"""The end of an epoch (its row of metrics, the evaluation, the best so far) and of a run (its summary)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fathoms.evaluate.examples import COUNT, choose, examples, spread
from fathoms.evaluate.loader import AnyLoader
from fathoms.evaluate.metrics import Evaluation, FewerChannels, evaluate
from fathoms.models.vit import ViT
from fathoms.train.build import model_image_size
from fathoms.train.context import RunContext, TrainState
from fathoms.train.distributed import sum_over_ranks
from fathoms.train.learner import Learner
from fathoms.train.record.run_folder import FORMAT


def live_numbers(state: TrainState, epochs: int, rate: float) -> dict[str, str]:
    """The numbers of the progress bar; reading them waits for the device."""
    loss, top1, _, count = state.sums.tolist()
    return {
        "epoch": f"{state.epoch + 1}/{epochs}",
        "loss": f"{loss / max(count, 1):.3f}",
        "top1": f"{100 * top1 / max(count, 1):.1f}",
        "images/s": f"{rate:,.0f}",
    }


def host_numbers(state: TrainState, epochs: int, rate: float, loss: float | None) -> dict[str, str]:
    """The numbers of a progress line that the host knows already."""
    numbers = {"epoch": f"{state.epoch + 1}/{epochs}", "update": f"{state.updates}"}
    if loss is not None:
        numbers["loss"] = f"{loss:.3f}"
    return {**numbers, "images/s": f"{rate:,.0f}"}


@dataclass(frozen=True)
class EpochEnd:
    """Finishes epochs: metrics, evaluation, best so far.

    Args:
        context: The run folder that gets the rows, and the held-out data.
        learner: The model to evaluate, or its EMA.
        state: The counters; they move on to the next epoch.
        channels: Input channels the model takes; further channels of the images are dropped.
        amp_dtype: Precision of autocast; None is full precision.
        say: Prints a line.
        track: Passes a row on to the trackers, after metrics.jsonl has it.
    """

    context: RunContext
    learner: Learner
    state: TrainState
    channels: int
    amp_dtype: torch.dtype | None
    say: Callable[[str], None]
    track: Callable[[dict[str, Any]], None]

    def finish(self, epochs: int, lr: float, rate: float) -> bool | None:
        """Write the training row, and evaluate if it is time; returns whether it is the best, None if not evaluated."""
        state, better = self.state, None
        row = self._training_row(lr, rate)
        self._record(row)
        state.next_epoch()
        line = f"epoch {state.epoch}/{epochs}  train loss {row['loss']:.4f}  top1 {row['top1']:.2f}"
        if state.epoch % self.context.job.run.eval_interval == 0 or state.epoch == epochs:
            better = False
            if self.context.data.val is not None:
                result = self._evaluate(self.context.data.val)
                better = self._is_best(result, lr)
                if state.epoch == epochs and self.context.data.test is None:
                    self._keep_details("val", self.context.data.val, result)
                line += f"  val loss {result.loss:.4f}  top1 {result.top1:.2f}"
        self.say(f"{line}  {rate:,.0f} images/s")
        if advice := self.context.data.train.advice():
            self.say(advice)
        return better

    def _training_row(self, lr: float, rate: float) -> dict[str, Any]:
        state, job = self.state, self.context.job
        loss, top1, top5, count = sum_over_ranks(self.context.world, state.sums).tolist()
        # Where every update of the epoch was skipped, nothing was counted.
        count = max(count, 1.0)
        row = {"epoch": state.epoch + 1, "step": state.updates, "split": "train", "loss": loss / count}
        row |= {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "lr": lr, "images_per_second": rate}
        if job.recipe.progressive_size is not None and job.image_sizes is not None:
            row["image_size"] = job.image_sizes.at(state.epoch)
        return row

    def test(self, lr: float) -> dict[str, Any] | None:
        """Evaluate the last weights once on the test split; None without one."""
        if self.context.data.test is None:
            return None
        result = self._evaluate(self.context.data.test)
        self._keep_details("test", self.context.data.test, result)
        place = {"epoch": self.state.epoch, "step": self.state.updates, "split": "test"}
        self._record({**place, **result.summary(), "lr": lr})
        self.say(f"test loss {result.loss:.4f}  top1 {result.top1:.2f}, of the last weights")
        return {**result.summary(), "checkpoint": "last"}

    def _keep_details(self, split: str, loader: AnyLoader, result: Evaluation) -> None:
        """Keep what the last evaluation says beyond its averages: each image, each class, and a dozen examples."""
        world, folder, job = self.context.world, self.context.folder, self.context.job
        details = {"split": split, "epoch": self.state.epoch, "images": result.images}
        folder.write_json("evaluation.json", {**details, "confusion": result.confusion.pairs()})
        chosen = spread(np.arange(len(loader.source)), COUNT)
        if world.size == 1:
            # With several ranks nobody has the results of all images.
            folder.write_correct(result.correct_bits())
            chosen = choose(result.correct)
        if world.is_main and not job.run.fsdp:
            shown = examples(
                FewerChannels(self._judged(), self.channels),
                loader,
                chosen,
                model_image_size(job),
                self.context.data.preprocessing,
                device=world.device,
                amp_dtype=self.amp_dtype,
            )
            folder.write_json("examples.json", {"split": split, "examples": shown})

    def _judged(self) -> nn.Module:
        """The model that is evaluated: its EMA where there is one."""
        return self.learner.model if self.learner.ema is None else self.learner.ema.module

    def _evaluate(self, loader: AnyLoader) -> Evaluation:
        """Evaluate the model, or its EMA where there is one, at the model's own image size."""
        model = self._judged()
        data, sizes = self.context.data, self.context.job.image_sizes
        if sizes is not None and isinstance(model, ViT):
            model.set_image_size(sizes.final)
        device = self.context.world.device
        return evaluate(
            FewerChannels(model, self.channels),
            loader.epoch(0),
            len(data.classes),
            device=device,
            amp_dtype=self.amp_dtype,
        )

    def _is_best(self, result: Evaluation, lr: float) -> bool:
        """Record an evaluation; whether it is the best so far. One that is not finite never is."""
        state, done = self.state, self.state.epoch - 1
        place = {"epoch": state.epoch, "step": state.updates, "split": "val"}
        self._record({**place, **result.summary(), "lr": lr})
        state.last = {"epoch": done, **result.summary()}
        if not math.isfinite(result.loss):
            self.context.folder.append("guard.jsonl", {"kind": "evaluation_not_finite", "epoch": state.epoch})
            self.say(f"guard: epoch {state.epoch}: the loss of the evaluation is not finite: not the best")
            return False
        if state.best is not None and result.top1 <= state.best["top1"]:
            return False
        state.best = {"epoch": done, "top1": result.top1, "top5": result.top5, "loss": result.loss}
        return True

    def _record(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl, then pass it on to the trackers."""
        self.context.folder.append("metrics.jsonl", row)
        self.track(row)


def not_finite(evaluations: dict[str, dict[str, Any] | None]) -> str | None:
    """Why a run is not done although all its epochs are: the first split whose loss is not finite; None if all are."""
    for split, found in evaluations.items():
        # A loss that was not finite is null in a checkpoint.
        if found is not None and (found["loss"] is None or not math.isfinite(found["loss"])):
            return f"the loss of the last weights on {split} is not finite; use a lower --lr, or another --precision"
    return None


def _from_one(evaluation: dict[str, Any] | None) -> dict[str, Any] | None:
    """An evaluation with its epoch from 1, as people read it; the loop counts from 0."""
    if evaluation is None or evaluation.get("epoch") is None:
        return evaluation
    return {**evaluation, "epoch": evaluation["epoch"] + 1}


def write_summary(
    context: RunContext,
    state: TrainState,
    model: nn.Module,
    guard: dict[str, Any],
    status: str,
    reason: str | None,
    test: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write summary.json, and return it; `test` is the evaluation on the test split, made once at the end."""
    state.note_memory(context.world.device)
    summary = {
        "version": FORMAT,
        "status": status,
        "reason": reason,
        "best": _from_one(state.best),
        "last": _from_one(state.last),
        "test": test,
        "epoch": state.epoch,
        "updates": state.updates,
        "seconds": state.seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_memory": state.peak_memory,
        "guard": guard,
        "bad_images": dict(sorted(context.data.train.stats.bad.items())),
        "folder": str(context.folder.path),
    }
    context.folder.write_summary(summary)
    return summary
