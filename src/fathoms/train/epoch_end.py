"""The end of an epoch: its row of metrics, the evaluation, the best so far, a checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fathoms.evaluate.metrics import Evaluation, FewerChannels, evaluate
from fathoms.models.vit import ViT
from fathoms.train.distributed import sum_over_ranks

if TYPE_CHECKING:
    from fathoms.train.loop import Trainer


def numbers(trainer: Trainer, elapsed: float, first: int) -> dict[str, str]:
    """What the live bar shows; reading it waits for the device."""
    loss, top1, _, count = trainer.sums.tolist()
    rate = (trainer.step - first) * trainer.recipe.batch_size * trainer.world.size / max(elapsed, 1e-9)
    return {
        "epoch": f"{trainer.epoch + 1}/{trainer.epochs}",
        "loss": f"{loss / max(count, 1):.3f}",
        "top1": f"{100 * top1 / max(count, 1):.1f}",
        "img/s": f"{rate:,.0f}",
        "data wait": f"{trainer.data.train.stats.wait_share:.0%}",
    }


def finish_epoch(trainer: Trainer, rate: float) -> None:
    """Write the training row; evaluate and save where it is time to."""
    row = _training_row(trainer, rate)
    record(trainer, row)
    trainer.sums.zero_()
    trainer.epoch, trainer.step = trainer.epoch + 1, 0
    line = f"epoch {trainer.epoch}/{trainer.epochs}  train loss {row['loss']:.4f}  top1 {row['top1']:.2f}"
    if trainer.epoch % trainer.job.run.eval_interval == 0 or trainer.epoch == trainer.epochs:
        result = _evaluate(trainer)
        trainer.last = result.summary()
        told = {"epoch": trainer.epoch - 1, "step": trainer.updates, "split": "val", **result.summary()}
        record(trainer, {**told, "lr": row["lr"]})
        better = _is_better(trainer, result)
        if better:
            names = ("top1", "top5", "loss")
            trainer.best = {"epoch": trainer.epoch - 1, **{name: getattr(result, name) for name in names}}
        line += f"  val loss {result.loss:.4f}  top1 {result.top1:.2f}"
        trainer.save(best=better)
    trainer.progress.say(f"{line}  {rate:,.0f} images/s")
    if advice := trainer.data.train.advice():
        trainer.progress.say(advice)


def record(trainer: Trainer, row: dict[str, Any]) -> None:
    """A row of metrics, first where it counts."""
    trainer.folder.append("metrics.jsonl", row)
    trainer.mirrors.log(row)


def _training_row(trainer: Trainer, rate: float) -> dict[str, Any]:
    loss, top1, top5, count = sum_over_ranks(trainer.world, trainer.sums).tolist()
    # Where every update of the epoch was held back, nothing was counted.
    count = max(count, 1.0)
    row = {"epoch": trainer.epoch, "step": trainer.updates, "split": "train", "loss": loss / count}
    row |= {"top1": 100 * top1 / count, "top5": 100 * top5 / count}
    rate_of_learning = trainer.schedule.lr(trainer.position() - 1e-9) * trainer.guard.lr_factor
    row |= {"lr": rate_of_learning, "images_per_second": rate}
    if trainer.recipe.progressive_size is not None and trainer.sizes is not None:
        row["image_size"] = trainer.sizes.at(trainer.epoch)
    return row


def _is_better(trainer: Trainer, result: Evaluation) -> bool:
    """Whether this is the best so far; a loss that is not finite never is."""
    if not (math.isfinite(result.loss) and math.isfinite(result.top1)):
        trainer.folder.append("guard.jsonl", {"kind": "evaluation_not_finite", "epoch": trainer.epoch - 1})
        said = "the loss of the evaluation is not finite: not the best"
        trainer.progress.say(f"guard: epoch {trainer.epoch}: {said}")
        return False
    return trainer.best is None or result.top1 > trainer.best["top1"]


def _evaluate(trainer: Trainer) -> Evaluation:
    judged = trainer.model if trainer.ema is None else trainer.ema.module
    if trainer.sizes is not None and isinstance(judged, ViT):
        judged.set_image_size(trainer.sizes.final)
    seen = FewerChannels(judged, trainer.channels)
    classes, device = len(trainer.data.classes), trainer.world.device
    return evaluate(seen, trainer.data.val.epoch(0), classes, device=device, amp_dtype=trainer.amp_dtype)
