"""The training loop: epochs of steps, each a pure function of the weights and three counters.

Order, augmentation and drop-path follow from (seed, epoch, step, rank), so a run that is stopped anywhere
goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.data import Batch, LoaderError
from fathoms.errors import ConfigError, FathomsError
from fathoms.models.vit import ViT
from fathoms.train.build import build_data, build_model, build_schedule
from fathoms.train.disk import check_room, file_sizes
from fathoms.train.distributed import World, check_agreement, naming_lost_ranks, together, whole
from fathoms.train.epoch_end import finish_epoch, numbers
from fathoms.train.foreign import timm_size
from fathoms.train.gate import Gate
from fathoms.train.graph import launched
from fathoms.train.guard import DivergedError, Guard, RollBack
from fathoms.train.job import Job
from fathoms.train.mirrors import Mirrors, Run, parse_mirrors
from fathoms.train.objective import Objective
from fathoms.train.optim import set_lr
from fathoms.train.outcome import DIVERGED, FAILED, Outcome, end
from fathoms.train.precision import set_stream
from fathoms.train.progress import Progress
from fathoms.train.respond import respond
from fathoms.train.resume import counters, go_on, roll_back
from fathoms.train.run_folder import RunFolder, dumps
from fathoms.train.saver import Saver
from fathoms.train.state import gather
from fathoms.train.stop import StopRequest
from fathoms.train.watch import Watch
from fathoms.train.wrap import wrap


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
        if job.run.probe_interval and (job.run.fsdp or not isinstance(self.model, ViT)):
            raise ConfigError("--probe-interval looks into fathoms models that are not sharded; leave it out")
        self.folder = RunFolder(job.folder, writes=world.is_main)
        self.show = show and world.is_main
        self.amp_dtype = getattr(torch, self.recipe.amp_dtype) if self.recipe.policy != "fp32" else None
        set_stream(self.model, self.recipe.policy)
        self.objective = Objective(self.recipe, self.model, self.data.classes, world.device)
        wrapped = wrap(job, world, self.model, self.objective)
        self.student, self.copies, self.ema, self.optimizer, self.scaler = wrapped
        self.compute = launched(self._compute, self.recipe.launch, self.student, world.size)
        self.epoch, self.step, self.updates = 0, 0, 0
        self.best: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.seconds = 0.0
        self.sums = torch.zeros(4, dtype=torch.float64, device=world.device)
        # What the batches of the update under way add to the sums, if it goes through.
        self.fresh = torch.zeros_like(self.sums)
        self.watch = Watch(world)
        self.guard = Guard(job.run, scaled=self.scaler.is_enabled())
        self.gate = Gate(self.model, self.optimizer)
        self.saver = Saver(
            self.folder,
            job.run.checkpoint_hist,
            world.device,
            lambda line: self.progress.say(f"warning: {line}"),
        )
        self.progress = Progress(0, 0, show=False)
        self.notices: list[str] = []
        self.stop = StopRequest()

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
        try:
            with together(self.world):
                self.folder.open()
                self._check_room()
            go_on(self)
            check_agreement(self.world, f"{self.epoch}/{self.step}/{self.updates}", "another checkpoint")
            self.folder.write_config({**self.job.table(), "classes": list(self.data.classes)})
            return self._train()
        finally:
            self.saver.close()
            self.folder.close()

    def _check_room(self) -> None:
        if self.folder.writes:
            sizes = file_sizes(self.model, self.recipe.opt, self.ema is not None)
            check_room(self.folder.checkpoints, sizes, self.job.run.checkpoint_hist)
            self.saver.copies.reserve(sum(sizes.values()) + (1 << 22))

    @property
    def _done(self) -> int:
        return self.epoch * self.data.train.steps + self.step

    def _train(self) -> Outcome:
        self.progress = progress = Progress(self.epochs * self.data.train.steps, self._done, self.show)
        told = Run(self.folder.path, self.job.table(), self.updates)
        self.mirrors = Mirrors(self.trackers, told, progress.say)
        progress.say(f"{self.data.train.describe()}; run folder {self.folder.path}")
        for notice in self.notices:
            progress.say(notice)
        try:
            with naming_lost_ranks(self.world), self.stop:
                self._prepare_rollback()
                while self.epoch < self.epochs:
                    try:
                        self._run_epoch()
                    except RollBack:
                        progress.say(
                            f"rolled back: {roll_back(self)}, learning rate x {self.guard.lr_factor}"
                        )
                        progress.rewind(self._done)
                    except LoaderError:
                        self._save_what_is_done()
                        raise
                    if self.stop_code is not None and self.epoch < self.epochs:
                        self.save()
                        self.saver.wait()
                        return end(self, "interrupted", self.stop_code)
                self.saver.wait()
            return end(self, "done", 0)
        except DivergedError as error:
            progress.close()
            progress.say(f"diverged: {error}")
            return end(self, "diverged", DIVERGED, str(error))
        except FathomsError as error:
            progress.close()
            # The disk that could not take a checkpoint may still take a line; the error itself is what counts.
            with contextlib.suppress(FathomsError):
                end(self, "failed", FAILED, str(error))
            raise
        finally:
            self.mirrors.finish()
            progress.close()

    @property
    def stop_code(self) -> int | None:
        """The exit code that a signal asks for; where there are several processes, once all of them know."""
        return self.stop.code if self.world.size == 1 else self.stop.agreed

    def _save_what_is_done(self) -> None:
        """A loader that gave up loses no update: the run goes on from the last one when its cause is removed.

        Where the last one is bad and would be rolled back, the checkpoint to go back to is there already.
        """
        if self.world.size == 1:
            self.step -= self.step % self.recipe.grad_accum_steps
            with contextlib.suppress(RollBack):
                self.save()
            self.saver.wait()

    def _prepare_rollback(self) -> None:
        """Where the guard may roll back, there must be something to roll back to."""
        wants = "rollback" in (self.job.run.guard, self.job.run.on_spike)
        if wants and self.updates == 0:
            self.save()

    def _run_epoch(self) -> None:
        steps, accumulate = self.data.train.steps, self.recipe.grad_accum_steps
        began, first, progress = time.monotonic(), self.step, self.progress
        interval = self.job.run.recovery_interval
        self._set_size(self.epoch)
        for batch in self.data.train.epoch(self.epoch, self.step):
            left = steps - steps % accumulate
            share = accumulate if self.step < left else steps % accumulate
            if self.updates not in self.guard.passed_over:
                self._forward_backward(batch, share)
            self.step += 1
            if self.step % accumulate and self.step < steps:
                continue
            self._update(batch)
            if progress.live and (self.updates % 10 == 0 or self.step == steps):
                progress.advance(0, numbers(self, time.monotonic() - began, first))
            progress.advance(accumulate if self.step % accumulate == 0 else self.step % accumulate)
            if interval and self.updates % interval == 0 and self.step < steps:
                self.save()
            if self.stop_code is not None and self.step < steps:
                # What the last update asks for, a rollback above all, comes before the last save.
                self._settle()
                self.seconds += time.monotonic() - began
                return
        self._settle()
        elapsed = time.monotonic() - began
        self.seconds += elapsed
        finish_epoch(self, (steps - first) * len(batch) * self.world.size / max(elapsed, 1e-9))

    def _set_size(self, epoch: int) -> None:
        """Train this epoch on the images that the recipe has for it."""
        if self.sizes is not None and isinstance(self.model, ViT):
            # The student may be a working copy, whose size is its own.
            for part in {self.model, *self.student.modules()}:
                if isinstance(part, ViT):
                    part.set_image_size(self.sizes.at(epoch))
            self.data.train.set_size(self.sizes.at(epoch))

    def compute_loss(self, student: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and logits of a batch, with the noise that belongs to its place."""
        images, targets = self._place(student, batch)
        return self._loss(student, images, targets)

    def _place(self, student: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Set the noise of a batch's place; its images and targets."""
        student.train()
        torch.manual_seed(step_seed(self.job.run.seed, batch.epoch, batch.step, self.world.rank))
        return batch.images[:, : self.channels], batch.labels if batch.targets is None else batch.targets

    def _loss(self, student: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(images.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None):
            return self.objective.loss(student, images, targets)

    def _compute(self, images: Tensor, targets: Tensor, parts: Tensor) -> tuple[Tensor, ...]:
        """Loss and logits of a batch that is one of `parts`; its share of the gradients is left in the parameters."""
        loss, logits = self._loss(self.student, images, targets)
        self.scaler.scale(loss / parts).backward()
        return loss.detach(), logits.detach()

    def _forward_backward(self, batch: Batch, share: int) -> None:
        if self.step % self.recipe.grad_accum_steps == 0:
            self.gate.open()
        images, targets = self._place(self.student, batch)
        # A tensor, so that a graph does not hold the number it was captured with.
        loss, logits = self.compute(images, targets, torch.full((), float(share), device=images.device))
        if self.copies is not None:
            self.copies.pull_gradients()
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch.labels[:, None]
        counts = (len(batch) * loss, hits[:, 0].sum(), hits.any(dim=1).sum())
        self.fresh += torch.stack([*counts, hits.new_full((), len(batch), dtype=torch.float64)]).double()

    def _update(self, batch: Batch) -> None:
        """Take the step, unless the device finds a number in it that is not finite."""
        if self.updates in self.guard.passed_over:
            self._settle()
            self.updates += 1
            return
        self.scaler.unscale_(self.optimizer)
        norm = self._gradient_norm()
        self._settle()
        self.saver.check()
        steps = (self.step - 1 - (self.step - 1) % self.recipe.grad_accum_steps, self.step)
        loss = self.fresh[0] / self.fresh[3]
        hold = self.watch.post(self.updates, self.epoch, steps, loss, norm, self.stop.vote)
        set_lr(self.optimizer, self.schedule.lr(self.position()) * self.guard.lr_factor)
        self.gate.step(hold)
        self.scaler.update()
        if self.copies is not None:
            self.copies.push_weights()
        self.optimizer.zero_grad(set_to_none=True)
        self.sums += torch.where(hold > 0, 0.0, self.fresh)
        self.fresh.zero_()
        self.updates += 1
        every = self.job.run.probe_interval
        if every and self.updates % every == 0 and self.world.is_main:
            self._probe(batch)

    def _gradient_norm(self) -> torch.Tensor:
        """The norm of the whole gradient, which is then cut to --clip-grad."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.recipe.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip_grad, norm)
        return whole(norm).detach()

    def _settle(self) -> None:
        """Learn what became of the update before: average it in, or do what the guard says."""
        seen = self.watch.read()
        if seen is None:
            return
        self.gate.settle(seen.held)
        self.stop.agree(seen.votes)
        if self.ema is not None and not seen.held:
            self.ema.update(self.model, seen.update + 1)
        finding = self.guard.judge(seen)
        if finding is not None:
            respond(self, seen, finding)

    def position(self) -> float:
        """The epoch as a fraction: updates done over updates an epoch."""
        return self.epoch + (self.updates - self.epoch * self.updates_per_epoch) / self.updates_per_epoch

    def _probe(self, batch: Batch) -> None:
        from fathoms.probes.signal import probe

        signal = probe(self.model, batch.images[:64, : self.channels], batch.labels[:64])
        self.folder.append("probe.jsonl", {"epoch": self.epoch, "step": self.updates, **signal.to_json()})

    def save(self, best: bool = False) -> None:
        """Put everything into a checkpoint, once it is known what became of the last update."""
        self._settle()
        parts = (self.model, self.optimizer, self.ema, self.scaler, counters(self))
        self.saver.save(lambda take: gather(*parts, take), best)


def step_seed(seed: int, epoch: int, step: int, rank: int) -> int:
    """The seed of drop-path and dropout in one step on one rank."""
    text = f"{seed}/{epoch}/{step}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
