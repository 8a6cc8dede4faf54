"""The numbers of an epoch: its row of metrics, the evaluation behind it, and whether that is the best so far."""

from __future__ import annotations

import math
from typing import Any

import torch

from fathoms.data import LoaderStats
from fathoms.evaluate.metrics import Evaluation, FewerChannels, evaluate
from fathoms.models.vit import ViT
from fathoms.train.course import Course
from fathoms.train.distributed import World, sum_over_ranks
from fathoms.train.scene import Scene
from fathoms.train.wrap import Learner


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


def training_row(course: Course, world: World, lr: float, rate: float) -> dict[str, Any]:
    """The training metrics of the epoch that has come to its end; every rank must ask."""
    loss, top1, top5, count = sum_over_ranks(world, course.sums.clone()).tolist()
    # Where every update of the epoch was held back, nothing was counted.
    count = max(count, 1.0)
    row = {"epoch": course.epoch, "step": course.updates, "split": "train", "loss": loss / count}
    row |= {"top1": 100 * top1 / count, "top5": 100 * top5 / count}
    return row | {"lr": lr, "images_per_second": rate}


def evaluated(scene: Scene, learner: Learner, channels: int, amp_dtype: torch.dtype | None) -> Evaluation:
    """What the model achieves on the held-out split at its own image size; its average, where there is one."""
    judged = learner.model if learner.ema is None else learner.ema.module
    sizes = scene.job.image_sizes
    if sizes is not None and isinstance(judged, ViT):
        judged.set_image_size(sizes.final)
    seen = FewerChannels(judged, channels)
    classes, device = len(scene.data.classes), scene.world.device
    return evaluate(seen, scene.data.val.epoch(0), classes, device=device, amp_dtype=amp_dtype)


def is_better(result: Evaluation, best: dict[str, Any] | None) -> bool:
    """Whether this is the best so far; a loss that is not finite never is."""
    return math.isfinite(result.loss) and (best is None or result.top1 > best["top1"])
