"""The numbers of a run: rows of metrics and evaluations, probes of its blocks, the progress line, the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fathoms.errors import ConfigError, FathomsError, reason
from fathoms.evaluating.metrics import Evaluation, FewerChannels, evaluate
from fathoms.evaluating.predict import COUNT, choose, examples, spread
from fathoms.evaluating.preprocessing import AnyLoader
from fathoms.models.vit import ViT
from fathoms.text_table import plural
from fathoms.training.build import model_image_size
from fathoms.training.distributed import sum_over_ranks
from fathoms.training.job import Job
from fathoms.training.learner import Learner, RunContext, TrainState
from fathoms.training.run_folder import FORMAT, RunFolder, describe_device

SHARE = 0.02
"""Largest share of a run's time that probing takes where no interval is given."""
SETTLED = 60.0
"""Seconds of training before the first of those: one that takes a second is then within the share."""
FEWEST = 200
"""Fewest updates between two of those."""
MOST = 60
"""Most of those in a run."""
IMAGES = 64
FEW_IMAGES = 16


class Probing:
    """Measures a run's model every N updates, or as often as it stays within 2 % of the time."""

    def __init__(self, folder: RunFolder, model: nn.Module, every: int | None, updates: int) -> None:
        self.folder, self.model, self.every = folder, model, every
        if every:
            _check_blocks(model)
        self.spacing = max(FEWEST, updates // MOST) if self.every is None else self.every
        """A measurement may be due after each so many updates; 0 is never."""
        self.spent = self.longest = 0.0
        self.last: dict[str, Any] | None = None
        self.live: dict[str, str] = {}
        """The worst block, for the progress line."""

    def due(self, seconds: float) -> bool:
        """Whether to measure after `spacing` more updates; `seconds` is the time that the run has trained."""
        if self.every is not None:
            return bool(self.every)
        if seconds < SETTLED or self.spent + self.longest > SHARE * seconds:
            return False
        if self.last is None:
            try:
                _check_blocks(self.model)
            except ConfigError:
                self.every = self.spacing = 0
        return self.every is None

    def measure(
        self, images: Tensor, labels: Tensor, optimizer: Optimizer, place: dict[str, int]
    ) -> str | None:
        """Probe the model on the first images of a batch and append the line; a warning where that failed.

        A measurement that nobody asked for must not end a run: it is then left out from here on.
        """
        if self.every is not None:
            self._measure(images[:IMAGES], labels[:IMAGES], optimizer, place)
            return None
        try:
            self._measure(images[:FEW_IMAGES], labels[:FEW_IMAGES], optimizer, place)
        except (FathomsError, torch.OutOfMemoryError) as error:
            self.every = self.spacing = 0
            return f"the blocks are no longer measured ({reason(error)}); --probe-interval 0 leaves it out"
        return None

    def _measure(self, images: Tensor, labels: Tensor, optimizer: Optimizer, place: dict[str, int]) -> None:
        from fathoms.probes.signal import probe

        began = time.monotonic()
        signal = probe(self.model, images, labels, optimizer=optimizer)
        self.last = {**place, **signal.to_json()}
        self.live = {"largest": _worst(self.last["sites"])}
        self.folder.append("probe.jsonl", _rounded(self.last))
        took = time.monotonic() - began
        self.spent, self.longest = self.spent + took, max(self.longest, took)

    def remark(self, update: int) -> str:
        """The last measurement before a divergence, as a part of the guard's message; else nothing."""
        if self.last is None:
            return ""
        from fathoms.probes.thresholds import THRESHOLDS

        sites = self.last["sites"]
        before = f"{update - self.last['step']} updates before"
        for column, limit, words in (
            ("logit", THRESHOLDS.logit / 2, "attention logits had reached {:.3g}"),
            ("largest", THRESHOLDS.float16 / 100, "values had reached {:.3g}"),
        ):
            found = [site for site in sites if site[column] is not None]
            site = max(found, key=lambda site: site[column], default=None)
            if site is not None and site[column] > limit:
                return f"; {site['block']}'s {words.format(site[column])}, {before}"
        return ""


def _check_blocks(model: nn.Module) -> None:
    from fathoms.probes.blocks import find_blocks

    find_blocks(model)


def _worst(sites: list[dict[str, Any]]) -> str:
    """The largest value of all blocks, and where it is."""
    site = max(sites, key=lambda site: float("inf") if site["largest"] is None else site["largest"])
    size = "not finite" if site["largest"] is None else f"{site['largest']:.3g}"
    return f"{size} at {site['block']}"


def _rounded(value: Any) -> Any:
    """The same with six digits of every number, which halves the file."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class EpochEnd:
    """Finishes epochs: metrics, evaluation, best so far."""

    context: RunContext
    learner: Learner
    state: TrainState
    channels: int
    amp_dtype: torch.dtype | None
    say: Callable[[str], None]
    track: Callable[[dict[str, Any]], None] | None

    def finish(self, epochs: int, lr: float, rate: float) -> bool | None:
        """Write the training row, and evaluate if it is time; returns whether it is the best, None if not evaluated."""
        state, better = self.state, None
        row = self._training_row(lr, rate)
        self._record(row)
        state.next_epoch()
        line = f"epoch {state.epoch}/{epochs}  train loss {row['loss']:.4f} {row['top1']:.2f} %"
        if state.epoch % self.context.job.run.eval_interval == 0 or state.epoch == epochs:
            better = False
            if self.context.data.val is not None:
                result = self._evaluate(self.context.data.val)
                better = self._is_best(result, lr, len(self.context.data.val.source))
                if state.epoch == epochs and self.context.data.test is None:
                    self._keep_details("val", self.context.data.val, result)
                line += f"  val {result.loss:.4f} {result.top1:.2f} %"
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
        self.say(f"test loss {result.loss:.4f} {result.top1:.2f} %, last weights")
        return {**result.summary(), "checkpoint": "last"}

    def _keep_details(self, split: str, loader: AnyLoader, result: Evaluation) -> None:
        """Keep what the last evaluation says beyond its averages: each image, each class, and a dozen examples."""
        world, folder, job = self.context.world, self.context.folder, self.context.job
        details = {"split": split, "epoch": self.state.epoch, "images": result.images}
        folder.write_json("evaluation.json", {**details, "confusion": result.confusion.pairs()})
        chosen = spread(np.arange(len(loader.source)), COUNT)
        if world.size == 1:
            # With several ranks nobody has the results of all images.
            folder.write("correct.bits", result.correct_bits())
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

    def _is_best(self, result: Evaluation, lr: float, images: int) -> bool:
        """Record an evaluation; whether it is the best so far. One that is not finite never is."""
        state, done = self.state, self.state.epoch - 1
        place = {"epoch": state.epoch, "step": state.updates, "split": "val"}
        self._record({**place, **result.summary(), "lr": lr})
        state.last = {"epoch": done, **result.summary()}
        if not math.isfinite(result.loss):
            self.context.folder.append("guard.jsonl", {"kind": "evaluation_not_finite", "epoch": state.epoch})
            self.say(f"guard: epoch {state.epoch}: the loss of the evaluation is not finite: not the best")
            return False
        best = best_of(state.best, {"epoch": done, **result.summary()}, images)
        better, state.best = best is not state.best, best
        return better

    def _record(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl, then pass it on to the trackers."""
        self.context.folder.append("metrics.jsonl", row)
        if self.track is not None:
            self.track(row)


def best_of(best: dict[str, Any] | None, new: dict[str, Any], images: int) -> dict[str, Any]:
    """The better of two evaluations on val: the later one, unless it is a standard error below the highest so far.

    A small val cannot tell epochs apart, and among equals the longest trained is taken.

    >>> first = best_of(None, {"epoch": 0, "top1": 97.2}, images=71)
    >>> best_of(first, {"epoch": 1, "top1": 95.8}, images=71)["epoch"]
    1
    >>> best_of(first, {"epoch": 1, "top1": 95.8}, images=10_000)["epoch"]
    0
    """
    highest = max(new["top1"], new["top1"] if best is None else best["highest"])
    share = (highest / 100 * images + 1) / (images + 2)
    error = 100 * math.sqrt(share * (1 - share) / images)
    return {**new, "highest": highest} if best is None or new["top1"] >= highest - error else best


def described(job: Job, parameters: int, updates_per_epoch: int, precision: str, ranks: int = 1) -> list[str]:
    """What is trained, and how."""
    recipe, config = job.recipe, job.config
    model = [job.model, f"{parameters / 1e6:.3g} M parameters"]
    if config is not None:
        shape = f"{plural(config.depth, 'block')} x {config.dim}"
        model[1:1] = [shape, f"{config.image_size} px", f"patch {config.patch_size}"]
    batch = recipe.batch_size * recipe.grad_accum_steps * ranks
    names = ("weight_decay", "smoothing", "aa", "mixup", "cutmix", "reprob", "model_ema", "teacher")
    how = [
        f"{plural(recipe.total_epochs, 'epoch')} x {plural(updates_per_epoch, 'update')} of {plural(batch, 'image')}",
        f"{recipe.opt} {recipe.lr:g} {recipe.sched}",
        f"warm-up {recipe.warmup_epochs:g} epochs",
        f"crop {recipe.crop}",
        *(f"{name.replace('_', '-')} {value}" for name in names if (value := getattr(recipe, name))),
        precision,
    ]
    return [f"model: {', '.join(model)}", f"training: {', '.join(how)}"]


ON_A_CPU = 0.13e9
"""Bytes of buffers and code that the first update of a process takes on a CPU besides, as measured."""


def expected_memory(job: Job, model: nn.Module, precision: str, device: torch.device) -> float | None:
    """Bytes of an update on this rank, as `fathoms cost` estimates them; None for a model without blocks."""
    from fathoms.probes.part_costs import update_memory

    channels = 3 if job.config is None else job.config.in_channels
    images = torch.zeros(2, channels, *2 * [model_image_size(job)], device=device)
    policy = "autocast" if precision.startswith("autocast") else precision
    try:
        size = update_memory(model, images, job.recipe.batch_size, policy, job.recipe.opt)
    except ConfigError:
        return None
    averaged = sum(each.numel() for each in model.parameters()) if job.recipe.model_ema else 0
    return size + 4 * averaged + (ON_A_CPU if device.type == "cpu" else 0)


def cost(job: Job, model: nn.Module, precision: str, device: torch.device) -> list[str]:
    """A line on the expected memory and what is free; the time left stands in the progress line."""
    from fathoms.machine import free_memory

    # A forward pass of one rank alone would wait for the shards of the others.
    size = None if job.run.fsdp else expected_memory(job, model, precision, device)
    if size is None:
        return ["cost: memory and time are known after a few updates"]
    free = free_memory(device.type)
    said = (
        f"cost: about {size / 1e9:.2g} GB of memory, {free / 1e9:.2g} GB are free; time: after a few updates"
    )
    if size < free:
        return [said]
    fitting = int(job.recipe.batch_size * free / size / 2)
    return [said, f"warning: that is more than is free; --batch-size {max(fitting, 1)} takes half of it"]


def resumed(context: RunContext, state: TrainState) -> list[str]:
    """A line on where a run resumes; none for a new one."""
    epochs, name = context.job.recipe.total_epochs, context.folder.path
    if state.epoch >= epochs:
        return [f"{name} holds this run, done after {plural(state.epoch, 'epoch')}; nothing is left to train"]
    return (
        [f"resumes in epoch {state.epoch + 1} of {epochs}, after update {state.updates}"]
        if state.updates
        else []
    )


def opening(context: RunContext, model: nn.Module, precision: str) -> list[str]:
    """What a run trains, how, what it costs, on which data, and where it writes."""
    job, world, data, folder = context
    parameters = sum(each.numel() for each in model.parameters())
    return [
        *described(job, parameters, context.updates_per_epoch, precision, world.size),
        *cost(job, model, precision, world.device),
        f"run folder: {folder.path}",
        data.train.describe(),
        f"splits: {data.roles.describe()}",
        f"device: {describe_device(world.device)}",
        *data.notices,
    ]


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
