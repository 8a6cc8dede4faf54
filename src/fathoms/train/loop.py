"""The training loop: epochs of steps, each a pure function of the weights and three counters.

Order, augmentation and drop-path follow from (seed, epoch, step, rank), so a run that is stopped anywhere
goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time

import torch

from fathoms.data import Batch, LoaderError
from fathoms.errors import ConfigError, FathomsError
from fathoms.models.build_timm import timm_size
from fathoms.models.vit import ViT
from fathoms.train.build import build_data, build_model, build_schedule
from fathoms.train.checkpoint.async_saver import Saver
from fathoms.train.checkpoint.disk_space import check_room, file_sizes
from fathoms.train.checkpoint.resume import counters, go_on, roll_back
from fathoms.train.checkpoint.state_dict import gather
from fathoms.train.context import Scene
from fathoms.train.distributed import World, check_agreement, naming_lost_ranks, together
from fathoms.train.epoch_end import EpochEnd, live_numbers
from fathoms.train.guard.actions import respond
from fathoms.train.guard.policy import DivergedError, Guard, RollBack
from fathoms.train.job import Job
from fathoms.train.learner import wrap
from fathoms.train.objective.objective import Objective
from fathoms.train.precision.policy import set_stream
from fathoms.train.record.outcome import DIVERGED, FAILED, Outcome, write_end
from fathoms.train.record.progress_bar import Progress
from fathoms.train.record.run_folder import RunFolder, dumps
from fathoms.train.record.trackers import Mirrors, Run, parse_mirrors
from fathoms.train.signals import StopRequest
from fathoms.train.step import Stepper
from fathoms.train.train_state import Course


class Trainer:
    """One run from its job to its summary: `Trainer(job, world).run()`."""

    def __init__(self, job: Job, world: World, show: bool = True) -> None:
        self.trackers = parse_mirrors(job.run.log) if world.is_main else ()
        self.recipe, self.schedule, self.sizes = job.recipe, build_schedule(job), job.image_sizes
        size = timm_size(job.model) if job.config is None else job.config.image_size
        data = build_data(job, size, world)
        self.scene = Scene(job, world, data, RunFolder(job.folder, writes=world.is_main))
        self.job, self.world, self.data, self.folder = self.scene
        self.channels = 3 if job.config is None else job.config.in_channels
        self.model = build_model(job, len(data.classes)).to(world.device)
        if job.run.probe_interval and (job.run.fsdp or not isinstance(self.model, ViT)):
            raise ConfigError("--probe-interval looks into fathoms models that are not sharded; leave it out")
        set_stream(self.model, self.recipe.policy)
        objective = Objective(self.recipe, self.model, data.classes, world.device)
        self.learner = wrap(job, world, self.model, objective)
        self.stepper = Stepper(self.scene, self.learner, objective, self.channels)
        self.course = Course(torch.zeros(4, dtype=torch.float64, device=world.device))
        self.guard = Guard(job.run, scaled=self.learner.scaler.is_enabled())
        self.show = show and world.is_main
        self.progress = Progress(0, 0, show=False)
        self.saver = Saver(
            self.folder,
            job.run.checkpoint_hist,
            world.device,
            lambda line: self.progress.say(f"warning: {line}"),
        )
        self.stop = StopRequest()

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return math.ceil(self.schedule.total_epochs)

    def run(self) -> Outcome:
        """Train to the end, or to the signal or the number that ends it."""
        identity = dumps({"job": self.job.identity(), "data": self.data.fingerprint})
        check_agreement(self.world, hashlib.sha256(identity.encode()).hexdigest())
        course = self.course
        try:
            with together(self.world):
                self.folder.open()
                self._check_room()
            notices = go_on(self.scene, self.learner, course, self.guard)
            check_agreement(
                self.world, f"{course.epoch}/{course.step}/{course.updates}", "another checkpoint"
            )
            self.folder.write_config({**self.job.table(), "classes": list(self.data.classes)})
            return self._train(notices)
        finally:
            self.saver.close()
            self.folder.close()

    def _check_room(self) -> None:
        if self.folder.writes:
            sizes = file_sizes(self.model, self.recipe.opt, self.learner.ema is not None)
            check_room(self.folder.checkpoints, sizes, self.job.run.checkpoint_hist)
            self.saver.copies.reserve(sum(sizes.values()) + (1 << 22))

    @property
    def _done(self) -> int:
        return self.course.epoch * self.data.train.batches + self.course.step

    def _train(self, notices: list[str]) -> Outcome:
        self.progress = progress = Progress(self.epochs * self.data.train.batches, self._done, self.show)
        told = Run(self.folder.path, self.job.table(), self.course.updates)
        mirrors = Mirrors(self.trackers, told, progress.say)
        self.epoch_end = EpochEnd(
            self.scene,
            self.learner,
            self.course,
            self.channels,
            self.stepper.amp_dtype,
            progress.say,
            mirrors.log,
        )
        for line in (f"{self.data.train.describe()}; run folder {self.folder.path}", *notices):
            progress.say(line)
        try:
            with naming_lost_ranks(self.world), self.stop:
                self._prepare_rollback()
                while self.course.epoch < self.epochs:
                    try:
                        self._run_epoch()
                    except RollBack:
                        self._roll_back()
                    except LoaderError:
                        self._save_what_is_done()
                        raise
                    if self.stop_code is not None and self.course.epoch < self.epochs:
                        self.save()
                        self.saver.wait()
                        return self._end("interrupted", self.stop_code)
                self.saver.wait()
            return self._end("done", 0)
        except DivergedError as error:
            progress.close()
            progress.say(f"diverged: {error}")
            return self._end("diverged", DIVERGED, str(error))
        except FathomsError as error:
            progress.close()
            # The disk that could not take a checkpoint may still take a line; the error itself is what counts.
            with contextlib.suppress(FathomsError):
                self._end("failed", FAILED, str(error))
            raise
        finally:
            mirrors.finish()
            progress.close()
            self._hear_the_saver()

    def _hear_the_saver(self) -> None:
        """A run that ends for another reason still says that its last checkpoint was not written."""
        try:
            self.saver.wait()
        except FathomsError as error:
            self.progress.say(f"warning: {error}")

    def _end(self, status: str, code: int, reason: str | None = None) -> Outcome:
        summary = write_end(self.scene, self.course, self.guard, self.model, status, reason)
        return Outcome(summary, code)

    @property
    def stop_code(self) -> int | None:
        """The exit code that a signal asks for; where there are several processes, once all of them know."""
        return self.stop.code if self.world.size == 1 else self.stop.agreed

    def _save_what_is_done(self) -> None:
        """A loader that gave up loses no update: the run goes on from the last one when its cause is removed.

        Where the last one is bad and would be rolled back, the checkpoint to go back to is there already.
        """
        if self.world.size == 1:
            self.course.step -= self.course.step % self.recipe.grad_accum_steps
            with contextlib.suppress(RollBack):
                self.save()
            self.saver.wait()

    def _prepare_rollback(self) -> None:
        """Where the guard may roll back, there must be something to roll back to."""
        wants = "rollback" in (self.job.run.guard, self.job.run.on_spike)
        if wants and self.course.updates == 0:
            self.save()

    def _roll_back(self) -> None:
        self.saver.wait()
        roll_back(self.scene, self.learner, self.course, self.guard)
        self.stepper.forget()
        self.progress.rewind(self._done)
        where = f"back at epoch {self.course.epoch}, update {self.course.updates}"
        self.progress.say(f"rolled back: {where}, learning rate x {self.guard.lr_factor}")

    def _run_epoch(self) -> None:
        steps, accumulate, course = self.data.train.batches, self.recipe.grad_accum_steps, self.course
        interval, progress = self.job.run.recovery_interval, self.progress
        first, began = course.step, time.monotonic()
        since = began

        def rate() -> float:
            images = (course.step - first) * self.recipe.batch_size * self.world.size
            return images / max(since - began, 1e-9)

        self._set_size(course.epoch)
        for batch in self.data.train.epoch(course.epoch, course.step):
            # What is left over at the end of an epoch makes a smaller update.
            parts = accumulate if course.step < steps - steps % accumulate else steps % accumulate
            if course.updates not in self.guard.passed_over:
                self.stepper.add(batch, parts, first=course.step % accumulate == 0)
            course.step += 1
            if course.step % accumulate and course.step < steps:
                continue
            self._update(batch)
            since = course.spend(since)
            if progress.live and (course.updates % 10 == 0 or course.step == steps):
                progress.advance(0, live_numbers(course, self.epochs, rate(), self.data.train.stats))
            progress.advance(parts)
            if interval and course.updates % interval == 0 and course.step < steps:
                self.save()
            if self.stop_code is not None and course.step < steps:
                # What the last update asks for, a rollback above all, comes before the last save.
                self._settle()
                return
        self._settle()
        since = course.spend(since)
        self._finish_epoch(rate())

    def _set_size(self, epoch: int) -> None:
        """Train this epoch on the images that the recipe has for it."""
        if self.sizes is not None and isinstance(self.model, ViT):
            # The student may be a working copy, whose size is its own.
            for part in {self.model, *self.learner.student.modules()}:
                if isinstance(part, ViT):
                    part.set_image_size(self.sizes.at(epoch))
            self.data.train.set_size(self.sizes.at(epoch))

    def _update(self, batch: Batch) -> None:
        """Take the step of the batches so far, unless the guard passes over it."""
        course = self.course
        if course.updates in self.guard.passed_over:
            self._settle()
            course.updates += 1
            return
        norm = self.stepper.gradient_norm()
        self._settle()
        self.saver.check()
        self.stepper.take(course, norm, self._lr(), self.stop.vote)
        course.updates += 1
        every = self.job.run.probe_interval
        if every and course.updates % every == 0 and self.world.is_main:
            self._probe(batch)

    def _lr(self, back: float = 0.0) -> float:
        """The learning rate at this place of the schedule, or a bit before it."""
        return (
            self.schedule.lr(self.course.position(self.scene.updates_per_epoch) - back) * self.guard.lr_factor
        )

    def _settle(self) -> None:
        """Learn what became of the update before, and do what the guard says."""
        seen = self.stepper.settle()
        if seen is None:
            return
        self.stop.agree(seen.votes)
        finding = self.guard.judge(seen)
        if finding is not None:
            respond(self.scene, self.stepper, seen, finding, self.progress.say)

    def _probe(self, batch: Batch) -> None:
        from fathoms.probes.signal import probe

        signal = probe(self.model, batch.images[:64, : self.channels], batch.labels[:64])
        place = {"epoch": self.course.epoch, "step": self.course.updates}
        self.folder.append("probe.jsonl", {**place, **signal.to_json()})

    def _finish_epoch(self, rate: float) -> None:
        better = self.epoch_end.finish(self.epochs, self._lr(back=1e-9), rate)
        if better is not None:
            self.save(best=better)

    def save(self, best: bool = False) -> None:
        """Put everything into a checkpoint, once it is known what became of the last update."""
        self._settle()
        values = counters(self.scene, self.course, self.guard)
        self.saver.save(lambda take: gather(self.learner, values, take), best)
