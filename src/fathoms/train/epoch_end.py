"""The end of an epoch: its row of metrics, the evaluation, the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fathoms.data import LoaderStats
from fathoms.evaluate.metrics import Evaluation, FewerChannels, evaluate
from fathoms.models.vit import ViT
from fathoms.train.context import Scene
from fathoms.train.distributed import sum_over_ranks
from fathoms.train.learner import Learner
from fathoms.train.train_state import Course


def live_numbers(course: Course, epochs: int, rate: float, stats: LoaderStats) -> dict[str, str]:
    """What the live bar shows; reading it waits for the device."""
    loss, top1, _, count = course.sums.tolist()
    return {
        "epoch": f"{course.epoch + 1}/{epochs}",
        "loss": f"{loss / max(count, 1):.3f}",
        "top1": f"{100 * top1 / max(count, 1):.1f}",
        "img/s": f"{rate:,.0f}",
        "data wait": f"{stats.wait_share:.0%}",
    }


@dataclass(frozen=True)
class EpochEnd:
    """Brings epochs to their end.

    Args:
        scene: Where the rows go, and what is evaluated on.
        learner: What is evaluated.
        course: What is counted; it goes on to the next epoch.
        channels: The model sees so many of an image's.
        amp_dtype: Precision of autocast; None is full precision.
        say: Takes a line for the user.
        mirror: Takes each row, behind metrics.jsonl.
    """

    scene: Scene
    learner: Learner
    course: Course
    channels: int
    amp_dtype: torch.dtype | None
    say: Callable[[str], None]
    mirror: Callable[[dict[str, Any]], None]

    def finish(self, epochs: int, lr: float, rate: float) -> bool | None:
        """Write the training row, and evaluate where it is time to: whether that is the best; None without it."""
        course, better = self.course, None
        row = self._training_row(lr, rate)
        self._record(row)
        course.next_epoch()
        line = f"epoch {course.epoch}/{epochs}  train loss {row['loss']:.4f}  top1 {row['top1']:.2f}"
        if course.epoch % self.scene.job.run.eval_interval == 0 or course.epoch == epochs:
            result = self._evaluate()
            better = self._note(result, lr)
            line += f"  val loss {result.loss:.4f}  top1 {result.top1:.2f}"
        self.say(f"{line}  {rate:,.0f} images/s")
        if advice := self.scene.data.train.advice():
            self.say(advice)
        return better

    def _training_row(self, lr: float, rate: float) -> dict[str, Any]:
        course, job = self.course, self.scene.job
        loss, top1, top5, count = sum_over_ranks(self.scene.world, course.sums).tolist()
        # Where every update of the epoch was held back, nothing was counted.
        count = max(count, 1.0)
        row = {"epoch": course.epoch, "step": course.updates, "split": "train", "loss": loss / count}
        row |= {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "lr": lr, "images_per_second": rate}
        if job.recipe.progressive_size is not None and job.image_sizes is not None:
            row["image_size"] = job.image_sizes.at(course.epoch)
        return row

    def _evaluate(self) -> Evaluation:
        """The model on the held-out split, or its average where there is one, at its own image size."""
        judged = self.learner.model if self.learner.ema is None else self.learner.ema.module
        data, sizes = self.scene.data, self.scene.job.image_sizes
        if sizes is not None and isinstance(judged, ViT):
            judged.set_image_size(sizes.final)
        seen, device = FewerChannels(judged, self.channels), self.scene.world.device
        return evaluate(seen, data.val.epoch(0), len(data.classes), device=device, amp_dtype=self.amp_dtype)

    def _note(self, result: Evaluation, lr: float) -> bool:
        """Record an evaluation; whether it is the best so far, which one that is not finite never is."""
        course, done = self.course, self.course.epoch - 1
        course.last = result.summary()
        self._record({"epoch": done, "step": course.updates, "split": "val", **course.last, "lr": lr})
        if not math.isfinite(result.loss):
            self.scene.folder.append("guard.jsonl", {"kind": "evaluation_not_finite", "epoch": done})
            self.say(f"guard: epoch {course.epoch}: the loss of the evaluation is not finite: not the best")
            return False
        if course.best is not None and result.top1 <= course.best["top1"]:
            return False
        course.best = {"epoch": done, "top1": result.top1, "top5": result.top5, "loss": result.loss}
        return True

    def _record(self, row: dict[str, Any]) -> None:
        """A row of metrics, first where it counts."""
        self.scene.folder.append("metrics.jsonl", row)
        self.mirror(row)
