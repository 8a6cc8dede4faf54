"""The training loop: epochs of steps, each a pure function of the weights and three counters.

Order, augmentation and drop-path follow from (seed, epoch, step, rank), so a run that is stopped anywhere
goes on as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fathoms.data import Batch
from fathoms.errors import ConfigError
from fathoms.evaluate.metrics import Evaluation, FewerChannels, evaluate
from fathoms.models.groups import param_groups
from fathoms.models.vit import ViT
from fathoms.train import checkpoint as checkpoints
from fathoms.train.build import build_data, build_model, timm_size
from fathoms.train.distributed import World, check_agreement, shard, sum_over_ranks, whole
from fathoms.train.ema import Ema
from fathoms.train.guard import DivergedError, explain
from fathoms.train.job import Job, differences
from fathoms.train.mirrors import Mirrors, Run, parse_mirrors
from fathoms.train.objective import Objective
from fathoms.train.optim import build_optimizer, set_lr
from fathoms.train.progress import Progress
from fathoms.train.run_folder import RunFolder, dumps
from fathoms.train.schedule import Schedule
from fathoms.train.state import gather, restore
from fathoms.train.stop import StopRequest

DIVERGED = 3
"""Exit code of a run whose numbers stopped being finite."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its summary as in summary.json, and the exit code."""

    summary: dict[str, Any]
    code: int


class Trainer:
    """One run from its job to its summary: `Trainer(job, world).run()`."""

    def __init__(self, job: Job, world: World, show: bool = True) -> None:
        self.job, self.world, self.recipe = job, world, job.recipe
        self.trackers = parse_mirrors(job.run.log) if world.is_main else ()
        self.schedule, self.sizes = build_schedule(job), job.image_sizes
        size = timm_size(job.model) if job.config is None else job.config.image_size
        self.data = build_data(job, size, world)
        self.channels = 3 if job.config is None else job.config.in_channels
        self.model = build_model(job, len(self.data.classes)).to(world.device)
        self.folder = RunFolder(job.folder, writes=world.is_main)
        self.show = show and world.is_main
        self.amp_dtype = getattr(torch, self.recipe.amp_dtype) if self.recipe.amp else None
        self.objective = Objective(self.recipe, self.model, self.data.classes, world.device)
        self._wrap()
        self.epoch, self.step, self.updates = 0, 0, 0
        self.best: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.seconds = 0.0
        self.sums = torch.zeros(4, dtype=torch.float64, device=world.device)

    def _wrap(self) -> None:
        """Put what trains around the model: shards or copies, compiler, optimizer, average."""
        recipe, world = self.recipe, self.world
        self.ema = (
            Ema(self.model, recipe.model_ema_decay, recipe.model_ema_warmup) if recipe.model_ema else None
        )
        self.student: nn.Module = self.objective.student
        if self.job.run.fsdp:
            if world.size == 1:
                raise ConfigError("--fsdp shards over several processes; start them with torchrun")
            # A wrapper calls the parts of blocks and not the blocks, so it is sharded as one.
            shard(self.student, by_block=self.student is self.model)
            if self.ema is not None:
                shard(self.ema.module)
        if world.size > 1 and not self.job.run.fsdp:
            ids = [world.device.index] if world.device.type == "cuda" else None
            self.student = nn.parallel.DistributedDataParallel(self.student, device_ids=ids)
        if recipe.torchcompile is not None:
            self.student = cast(
                nn.Module, torch.compile(self.student, backend=recipe.torchcompile, dynamic=False)
            )
        groups = param_groups(self.model, recipe.weight_decay, recipe.layer_decay)
        own = {"momentum": recipe.momentum, "betas": recipe.opt_betas, "eps": recipe.opt_eps}
        self.optimizer = build_optimizer(groups, recipe.opt, lr=recipe.lr, **own)
        half = self.amp_dtype == torch.float16 and world.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=half)

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps of one epoch; the last may gather fewer gradients."""
        return math.ceil(self.data.train.steps / self.recipe.grad_accum_steps)

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return math.ceil(self.schedule.total_epochs)

    def run(self) -> Outcome:
        """Train to the end, or to the signal or the number that ends it."""
        identity = dumps({"job": self.job.identity(), "data": self.data.fingerprint})
        check_agreement(self.world, hashlib.sha256(identity.encode()).hexdigest())
        self.folder.open()
        try:
            self._resume()
            self.folder.write_config({**self.job.table(), "classes": list(self.data.classes)})
            return self._train()
        finally:
            self.folder.close()

    def _train(self) -> Outcome:
        total = self.epochs * self.data.train.steps
        done = self.epoch * self.data.train.steps + self.step
        progress = Progress(total, done, self.show)
        told = Run(self.folder.path, self.job.table(), self.updates)
        self.mirrors = Mirrors(self.trackers, told, progress.say)
        progress.say(f"{self.data.train.describe()}; run folder {self.folder.path}")
        try:
            with StopRequest() as stop:
                while self.epoch < self.epochs:
                    self._run_epoch(progress, stop)
                    if stop.code is not None and self.epoch < self.epochs:
                        self._save()
                        return self._end("interrupted", stop.code)
            return self._end("done", 0)
        except DivergedError as error:
            progress.close()
            progress.say(f"diverged: {error}")
            return self._end("diverged", DIVERGED, str(error))
        finally:
            self.mirrors.finish()
            progress.close()

    def _run_epoch(self, progress: Progress, stop: StopRequest) -> None:
        steps, accumulate = self.data.train.steps, self.recipe.grad_accum_steps
        began, first = time.monotonic(), self.step
        interval = self.job.run.recovery_interval
        self._set_size(self.epoch)
        for batch in self.data.train.epoch(self.epoch, self.step):
            left = steps - steps % accumulate
            share = accumulate if self.step < left else steps % accumulate
            self._forward_backward(batch, share)
            self.step += 1
            if self.step % accumulate and self.step < steps:
                continue
            self._update(batch)
            if self.updates % 10 == 0 or self.step == steps:
                progress.advance(0, self._numbers(time.monotonic() - began, first))
            progress.advance(accumulate if self.step % accumulate == 0 else self.step % accumulate)
            if interval and self.updates % interval == 0 and self.step < steps:
                self._save()
            if stop.code is not None and self.step < steps:
                self.seconds += time.monotonic() - began
                return
        elapsed = time.monotonic() - began
        self.seconds += elapsed
        self._finish_epoch(progress, (steps - first) * len(batch) * self.world.size / max(elapsed, 1e-9))

    def _set_size(self, epoch: int) -> None:
        """Train this epoch on the images that the recipe has for it."""
        if self.sizes is not None and isinstance(self.model, ViT):
            self.model.set_image_size(self.sizes.at(epoch))
            self.data.train.set_size(self.sizes.at(epoch))

    def _forward_backward(self, batch: Batch, share: int) -> None:
        self.student.train()
        torch.manual_seed(step_seed(self.job.run.seed, self.epoch, self.step, self.world.rank))
        images = batch.images[:, : self.channels]
        with torch.autocast(self.world.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None):
            loss, logits = self.objective.loss(self.student, images, batch)
        self.scaler.scale(loss / share).backward()
        with torch.no_grad():
            hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch.labels[:, None]
            counts = (len(batch) * loss.detach(), hits[:, 0].sum(), hits.any(dim=1).sum())
            self.sums += torch.stack([*counts, hits.new_full((), len(batch), dtype=torch.float64)]).double()
        self.loss = loss.detach()

    def _update(self, batch: Batch) -> None:
        """Look at the gradient, then take the step, or stop before it."""
        self.scaler.unscale_(self.optimizer)
        limit = self.recipe.clip_grad if self.recipe.clip_grad is not None else math.inf
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        verdict = torch.stack([self.loss.double(), norm.detach().double().to(self.loss.device)])
        verdict = sum_over_ranks(self.world, verdict)
        if not self.scaler.is_enabled() and not bool(verdict.isfinite().all()):
            source = self.data.train.source
            files = [source.where(int(index)) for index in batch.ids]
            where = f"epoch {self.epoch}, step {self.step - 1}"
            raise explain(self.model, batch.images[:, : self.channels], float(self.loss), where, files)
        set_lr(self.optimizer, self.schedule.lr(self._position()))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        if self.ema is not None:
            self.ema.update(self.model, self.updates)
        every = self.job.run.probe_interval
        if every and self.updates % every == 0 and isinstance(self.model, ViT) and self.world.size == 1:
            self._probe(batch)

    def _position(self) -> float:
        """The epoch as a fraction: updates done over updates an epoch."""
        return self.epoch + (self.updates - self.epoch * self.updates_per_epoch) / self.updates_per_epoch

    def _probe(self, batch: Batch) -> None:
        from fathoms.probes.signal import probe

        signal = probe(self.model, batch.images[:64, : self.channels], batch.labels[:64])
        self.folder.append("probe.jsonl", {"epoch": self.epoch, "step": self.updates, **signal.to_json()})

    def _numbers(self, elapsed: float, first: int) -> dict[str, str]:
        loss, top1, _, count = self.sums.tolist()
        rate = (self.step - first) * self.recipe.batch_size * self.world.size / max(elapsed, 1e-9)
        wait = self.data.train.stats.wait_share
        numbers = {"epoch": f"{self.epoch + 1}/{self.epochs}", "loss": f"{loss / count:.3f}"}
        return numbers | {
            "top1": f"{100 * top1 / count:.1f}",
            "img/s": f"{rate:,.0f}",
            "data wait": f"{wait:.0%}",
        }

    def _finish_epoch(self, progress: Progress, rate: float) -> None:
        loss, top1, top5, count = sum_over_ranks(self.world, self.sums).tolist()
        row = {"epoch": self.epoch, "step": self.updates, "split": "train", "loss": loss / count}
        row |= {"top1": 100 * top1 / count, "top5": 100 * top5 / count}
        row |= {"lr": self.schedule.lr(self._position() - 1e-9), "images_per_second": rate}
        if self.recipe.progressive_size is not None and self.sizes is not None:
            row["image_size"] = self.sizes.at(self.epoch)
        self._record(row)
        self.sums.zero_()
        self.epoch, self.step = self.epoch + 1, 0
        line = f"epoch {self.epoch}/{self.epochs}  train loss {row['loss']:.4f}  top1 {row['top1']:.2f}"
        better = False
        if self.epoch % self.job.run.eval_interval == 0 or self.epoch == self.epochs:
            result = self._evaluate()
            self.last = result.summary()
            better = self.best is None or result.top1 > self.best["top1"]
            told = {"epoch": self.epoch - 1, "step": self.updates, "split": "val", **result.summary()}
            self._record({**told, "lr": row["lr"]})
            if better:
                self.best = {
                    "epoch": self.epoch - 1,
                    "top1": result.top1,
                    "top5": result.top5,
                    "loss": result.loss,
                }
            line += f"  val loss {result.loss:.4f}  top1 {result.top1:.2f}"
            self._save(best=better)
        progress.say(f"{line}  {rate:,.0f} images/s")
        if advice := self.data.train.advice():
            progress.say(advice)

    def _record(self, row: dict[str, Any]) -> None:
        """A row of metrics, first where it counts."""
        self.folder.append("metrics.jsonl", row)
        self.mirrors.log(row)

    def _evaluate(self) -> Evaluation:
        judged = self.model if self.ema is None else self.ema.module
        if self.sizes is not None and isinstance(judged, ViT):
            judged.set_image_size(self.sizes.final)
        seen = FewerChannels(judged, self.channels)
        classes, device = len(self.data.classes), self.world.device
        return evaluate(seen, self.data.val.epoch(0), classes, device=device, amp_dtype=self.amp_dtype)

    def _save(self, best: bool = False) -> None:
        values = {
            "epoch": self.epoch,
            "step": self.step,
            "updates": self.updates,
            "best": self.best,
            "last": self.last,
            "seconds": self.seconds,
            "sums": self.sums.tolist(),
            "lines": {name: self.folder.length(name) for name in ("metrics.jsonl", "probe.jsonl")},
            "identity": self.job.identity(),
            "data": self.data.fingerprint,
            "classes": list(self.data.classes),
        }
        kept = gather(self.model, self.optimizer, self.ema, self.scaler, values)
        if self.world.is_main:
            checkpoints.save(self.folder.checkpoints, kept)
            if best:
                checkpoints.keep_as_best(self.folder.checkpoints)

    def _resume(self) -> None:
        """Go on from the newest whole checkpoint, if the run is the same."""
        folder = checkpoints.newest(self.folder.checkpoints)
        if folder is None:
            return
        if self.job.run.resume == "never":
            raise ConfigError(
                f"{self.folder.path}: holds a run already; choose another --experiment or --resume auto"
            )
        kept = checkpoints.read(folder)
        changed = differences(kept.state["identity"], self.job.identity())
        if changed:
            raise ConfigError(f"{self.folder.path}: holds a run with other settings ({'; '.join(changed)})")
        if kept.state["data"] != self.data.fingerprint:
            raise ConfigError(f"{self.folder.path}: the data set has changed since this run began")
        restore(kept, self.model, self.optimizer, self.ema, self.scaler, str(folder))
        for name in ("epoch", "step", "updates", "best", "last", "seconds"):
            setattr(self, name, kept.state[name])
        self.sums.copy_(torch.tensor(kept.state["sums"], dtype=torch.float64))
        for name, length in kept.state["lines"].items():
            self.folder.cut(name, length)

    def _end(self, status: str, code: int, reason: str | None = None) -> Outcome:
        peak = torch.cuda.max_memory_allocated() if self.world.device.type == "cuda" else None
        summary = {
            "status": status,
            "reason": reason,
            "best": self.best,
            "last": self.last,
            "epoch": self.epoch,
            "updates": self.updates,
            "seconds": self.seconds,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "peak_memory": peak,
            "bad_images": dict(sorted(self.data.train.stats.bad.items())),
            "folder": str(self.folder.path),
        }
        self.folder.write_summary(summary)
        return Outcome(summary, code)


def build_schedule(job: Job) -> Schedule:
    """The learning rate of a job."""
    recipe = job.recipe
    names = ("epochs", "min_lr", "warmup_lr", "warmup_epochs", "warmup_prefix", "cooldown_epochs")
    names += ("decay_epochs", "decay_rate", "epoch_factor", "epoch_threshold", "sched_on_updates")
    return Schedule(recipe.sched, recipe.lr, **{name: getattr(recipe, name) for name in names})


def step_seed(seed: int, epoch: int, step: int, rank: int) -> int:
    """The seed of drop-path and dropout in one step on one rank."""
    text = f"{seed}/{epoch}/{step}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
