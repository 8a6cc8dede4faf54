"""The training loop: epochs of batches and updates, each a pure function of the weights and a few counters.

Order, augmentation and drop-path follow from (seed, epoch, batch, rank), so a run that is stopped anywhere resumes as
if it had never stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from typing import Any

import torch

from fathoms.data import Batch, LoaderError
from fathoms.data.sources.splits import Roles
from fathoms.errors import ConfigError, FathomsError
from fathoms.models.build_timm import timm_size
from fathoms.models.vit import ViT
from fathoms.parts.prores import Warmup
from fathoms.text_table import plural
from fathoms.train.build import build_data, build_model, build_schedule
from fathoms.train.checkpoint.async_saver import AsyncSaver
from fathoms.train.checkpoint.disk_space import check_room, file_sizes
from fathoms.train.checkpoint.resume import recorded_speed, resume, roll_back
from fathoms.train.checkpoint.state_dict import counters, gather
from fathoms.train.context import RunContext, TrainState
from fathoms.train.distributed import World, check_agreement, naming_lost_ranks, raise_on_all
from fathoms.train.epoch_end import EpochEnd, host_numbers, live_numbers, write_summary
from fathoms.train.guard.actions import act_on
from fathoms.train.guard.policy import DivergedError, Guard, RollBack
from fathoms.train.job import Job
from fathoms.train.learner import build_learner
from fathoms.train.objective.objective import Objective
from fathoms.train.precision.cuda_graph import WARMUP
from fathoms.train.precision.machine import device_name, settle
from fathoms.train.precision.policy import set_stream
from fathoms.train.record.environment import describe_device
from fathoms.train.record.probing import Probing
from fathoms.train.record.progress_bar import Progress
from fathoms.train.record.run_folder import DIVERGED, FAILED, Outcome, RunFolder, dumps
from fathoms.train.record.start_profile import StartProfile
from fathoms.train.record.trackers import RunInfo, Trackers, parse_trackers
from fathoms.train.record.updates import UpdateLog
from fathoms.train.signals import StopRequest
from fathoms.train.step import Stepper


class Trainer:
    """One run from its job to its summary: `Trainer(job, world).run()`.

    Args:
        job: The run.
        world: Its ranks.
        show: Whether progress is printed.
        roles: The data by its roles, where it is open already; None opens it.
        start: The profile of the start, from the command on.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        show: bool = True,
        roles: Roles | None = None,
        start: StartProfile | None = None,
    ) -> None:
        self.start = StartProfile() if start is None else start
        self.tracker_names = parse_trackers(job.run.log) if world.is_main else ()
        self.schedule, self.sizes = build_schedule(job), job.image_sizes
        size = timm_size(job.model) if job.config is None else job.config.image_size
        data = build_data(job, size, world, roles)
        self.start.mark("data")
        folder = RunFolder(job.folder, writes=world.is_main)
        self.context = RunContext(job, world, data, folder)
        self.channels = 3 if job.config is None else job.config.in_channels
        self.model = build_model(job, len(data.classes)).to(world.device)
        self.start.mark("model")
        if job.run.probe_interval and job.run.fsdp:
            raise ConfigError("--probe-interval works on models that are not sharded; leave it out")
        batches = math.ceil(self.schedule.total_epochs) * self.context.batches_per_epoch
        speed, self.speed_lines = settle(job, world, batches, recorded_speed(folder.checkpoints))
        set_stream(self.model, speed.precision)
        objective = Objective(job.recipe, self.model, data.classes, world.device)
        self.learner = build_learner(job, world, self.model, objective, speed)
        self.stepper = Stepper(job, world, self.learner, objective, self.channels)
        averaged = [] if self.learner.ema is None else [self.learner.ema.module]
        # The bfloat16 copy has the model's own buffers.
        self.warmup = Warmup(self.model, *averaged)
        self.start.mark("optimizer and copies")
        self.state = TrainState(torch.zeros(4, dtype=torch.float64, device=world.device))
        self.guard = Guard(job.run, scaled=self.learner.scaler.is_enabled())
        self.show = show and world.is_main
        self._updates_here = 0
        self.progress = Progress(0, 0, show=False)
        self.updates = UpdateLog(folder)
        every = 0 if job.run.fsdp else job.run.probe_interval
        self.probing = Probing(folder, self.model, every, self.epochs * self.context.updates_per_epoch)
        self.saver = AsyncSaver(folder, job.run.checkpoint_hist, world.device, self._warn)
        self.stop = StopRequest()

    def _warn(self, line: str) -> None:
        self.progress.say(f"warning: {line}")

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return math.ceil(self.schedule.total_epochs)

    def run(self) -> Outcome:
        """Train to the end, or until a signal or a non-finite number ends the run."""
        job, world, data, folder = self.context
        speed = {**vars(self.learner.speed), "device": device_name(world.device)}
        identity = dumps({"job": job.identity(), "data": data.fingerprint, "speed": speed})
        check_agreement(world, hashlib.sha256(identity.encode()).hexdigest())
        state = self.state
        try:
            with raise_on_all(world):
                folder.open()
                self._check_room()
            notices = resume(self.context, self.learner, state, self.guard)
            check_agreement(world, f"{state.epoch}/{state.batch}/{state.updates}", "another checkpoint")
            notices = [*self._resumed(), *notices]
            known = {"classes": list(data.classes), "roles": data.roles.sizes(), "speed": speed}
            table = {**job.table(), **known, "preprocessing": data.preprocessing.to_dict()}
            folder.write_config(table, resumed=state.updates > 0)
            folder.write_split(data.roles.split())
            self.start.mark("run folder")
            return self._train(notices)
        except FathomsError:
            self.saver.close()
            folder.discard()
            raise
        finally:
            self.saver.close()
            folder.close()

    def _resumed(self) -> list[str]:
        """A line on where a run resumes; none for a new one."""
        state, name = self.state, self.context.folder.path
        if state.epoch >= self.epochs:
            return [
                f"{name} holds this run, done after {plural(state.epoch, 'epoch')}; nothing is left to train"
            ]
        if state.updates == 0:
            return []
        return [f"resumes in epoch {state.epoch + 1} of {self.epochs}, after update {state.updates}"]

    def _check_room(self) -> None:
        job, folder = self.context.job, self.context.folder
        if folder.writes:
            sizes = file_sizes(self.model, job.recipe.opt, self.learner.ema is not None)
            check_room(folder.checkpoints, sizes, job.run.checkpoint_hist)
            self.saver.staging.reserve(sum(sizes.values()) + (1 << 22))

    @property
    def _batches_done(self) -> int:
        return self.state.epoch * self.context.batches_per_epoch + self.state.batch

    def _train(self, notices: list[str]) -> Outcome:
        job, world, data, folder = self.context
        total = self.epochs * self.context.batches_per_epoch
        self.progress = progress = Progress(total, self._batches_done, self.show)
        info = RunInfo(folder.path, job.table(), self.state.updates)
        trackers = Trackers(self.tracker_names, info, progress.say)
        self.epoch_end = EpochEnd(
            self.context,
            self.learner,
            self.state,
            self.channels,
            self.stepper.amp_dtype,
            progress.say,
            trackers.log,
        )
        about = (
            f"run folder: {folder.path}",
            data.train.describe(),
            f"splits: {data.roles.describe()}",
            f"device: {describe_device(world.device)}",
        )
        for line in (*about, *self.speed_lines, *data.notices, *notices):
            progress.say(line)
        try:
            with naming_lost_ranks(world), self.stop:
                self._prepare_rollback()
                while self.state.epoch < self.epochs:
                    try:
                        self._run_epoch()
                    except RollBack:
                        self._roll_back()
                    except LoaderError:
                        self._save_finished_updates()
                        raise
                    if self.stop_code is not None and self.state.epoch < self.epochs:
                        progress.say("a signal came: saving, then ending; the same command resumes")
                        self.save()
                        self.saver.wait()
                        return self._end("interrupted", self.stop_code)
                self.saver.wait()
                progress.activity = "evaluating"
                test = self.epoch_end.test(self._lr(back=1e-9))
            return self._end("done", 0, test=test)
        except DivergedError as error:
            progress.close()
            progress.say(f"diverged: {error}")
            return self._end("diverged", DIVERGED, str(error))
        except FathomsError as error:
            progress.close()
            # A disk that could not take a checkpoint may still take a summary; the first error is what counts.
            with contextlib.suppress(FathomsError):
                self._end("failed", FAILED, str(error))
            raise
        finally:
            trackers.finish()
            progress.close()
            self._report_last_save()

    def _report_last_save(self) -> None:
        """A run that ends for another reason still reports that its last checkpoint was not written."""
        try:
            self.saver.wait()
        except FathomsError as error:
            self._warn(str(error))

    def _end(
        self, status: str, code: int, reason: str | None = None, test: dict[str, Any] | None = None
    ) -> Outcome:
        self.updates.flush()
        guard = self.guard.summary()
        summary = write_summary(self.context, self.state, self.model, guard, status, reason, test)
        return Outcome(summary, code)

    @property
    def stop_code(self) -> int | None:
        """The exit code that a signal asks for; with several ranks, once all of them know."""
        return self.stop.code if self.context.world.size == 1 else self.stop.agreed

    def _save_finished_updates(self) -> None:
        """Save after the last finished update when the loader has failed, so that the run can be resumed from there.

        If that update is bad and would be rolled back, the checkpoint to return to is already there.
        """
        if self.context.world.size == 1:
            self.state.batch -= self.state.batch % self.context.job.recipe.grad_accum_steps
            with contextlib.suppress(RollBack):
                self.save()
            self.saver.wait()

    def _prepare_rollback(self) -> None:
        """Save before the first update if the guard may roll back, so that there is a checkpoint to return to."""
        options = self.context.job.run
        if "rollback" in (options.guard, options.on_spike) and self.state.updates == 0:
            self.save()

    def _roll_back(self) -> None:
        self.saver.wait()
        roll_back(self.context, self.learner, self.state, self.guard)
        self.stepper.clear()
        self.updates.clear()
        self.progress.rewind(self._batches_done)
        where = f"back in epoch {self.state.epoch + 1}, after update {self.state.updates}"
        self.progress.say(f"rolled back: {where}, learning rate x {self.guard.lr_factor}")

    def _run_epoch(self) -> None:
        job, _, data, _ = self.context
        batches, accumulate = self.context.batches_per_epoch, job.recipe.grad_accum_steps
        interval, progress, state = job.run.recovery_interval, self.progress, self.state
        first, began = state.batch, time.monotonic()
        since = began

        def rate() -> float:
            images = (state.batch - first) * data.train.sampler.global_batch
            return images / max(since - began, 1e-9)

        self._set_size(state.epoch)
        for batch in data.train.epoch(state.epoch, state.batch):
            self.start.mark("first batch")
            # The batches left over at the end of an epoch make a smaller update.
            full = state.batch < batches - batches % accumulate
            parts = accumulate if full else batches % accumulate
            if state.updates not in self.guard.passed_over:
                self.warmup.set(state.updates / (self.epochs * self.context.updates_per_epoch))
                self.stepper.accumulate(batch, parts, first=state.batch % accumulate == 0)
            state.batch += 1
            if state.batch % accumulate and state.batch < batches:
                continue
            self.saver.check()
            self._update(batch)
            self._mark_update()
            since = state.add_time(since)
            inside = {**self.updates.live(), **self.probing.live}
            if progress.live and (state.updates % 10 == 0 or state.batch == batches):
                numbers = live_numbers(state, self.epochs, rate())
                wait = f"{data.train.stats.wait_share:.0%}"
                progress.advance(0, {**numbers, **inside, "data wait": wait})
            elif self.show and not progress.live:
                numbers = host_numbers(state, self.epochs, rate(), self.updates.recent())
                progress.advance(0, {**numbers, **inside})
            progress.advance(parts)
            if interval and state.updates % interval == 0 and state.batch < batches:
                self.save()
            if self.stop_code is not None and state.batch < batches:
                # The last update may ask for a rollback, which comes before the last save.
                self._finish_previous()
                return
        self._finish_previous()
        since = state.add_time(since)
        self._finish_epoch(rate())

    def _mark_update(self) -> None:
        """Note the first updates: what is compiled is compiled in the first, and captured after the warm-up."""
        self._updates_here += 1
        if self._updates_here == 1:
            self.start.mark("first update")
        elif self._updates_here == WARMUP:
            self.start.mark("warm-up updates")
        elif self._updates_here == WARMUP + 1 and self.learner.speed.launch == "graph":
            self.start.mark("capture")

    def _set_size(self, epoch: int) -> None:
        """Set the image size of this epoch (--progressive-size)."""
        if self.sizes is not None and isinstance(self.model, ViT):
            # The compute model may be a bfloat16 copy, which has a size of its own.
            for part in {self.model, *self.learner.compute_model.modules()}:
                if isinstance(part, ViT):
                    part.set_image_size(self.sizes.at(epoch))
            self.context.data.train.set_size(self.sizes.at(epoch))

    def _update(self, batch: Batch) -> None:
        """Apply the accumulated gradients, unless the guard passes over this update."""
        state = self.state
        if state.updates in self.guard.passed_over:
            self._finish_previous()
            state.updates += 1
            return
        norm = self.stepper.gradient_norm()
        self._finish_previous()
        self.stepper.apply(state, norm, self._lr(), self.stop.vote)
        state.updates += 1
        if self.context.world.is_main and self.probing.due(state.updates, state.seconds):
            self._probe(batch)

    def _lr(self, back: float = 0.0) -> float:
        """The learning rate of this update; `back` is a fraction of an epoch to look back."""
        position = self.state.position(self.context.updates_per_epoch)
        return self.schedule.lr(position - back) * self.guard.lr_factor

    def _finish_previous(self) -> None:
        """Read how the previous update went, and act on what the guard finds."""
        report = self.stepper.finish_previous()
        if report is None:
            return
        if report.votes:
            self.stop.agree(report.votes)
        self.updates.add(report.update + 1, report.loss, report.norm)
        finding = self.guard.judge(report)
        if finding is not None:
            model, replay = self.stepper.unwrapped_model, self.stepper.replay
            remark = self.probing.remark(report.update + 1)
            act_on(finding, report, self.context, model, replay, self.progress.say, remark)

    def _probe(self, batch: Batch) -> None:
        place = {"epoch": self.state.epoch + 1, "step": self.state.updates}
        images = batch.images[:, : self.channels]
        warning = self.probing.measure(images, batch.labels, self.learner.optimizer, place)
        if warning is not None:
            self._warn(warning)

    def _finish_epoch(self, rate: float) -> None:
        self.progress.activity = "evaluating"
        with self.start.phase("first evaluation"):
            better = self.epoch_end.finish(self.epochs, self._lr(back=1e-9), rate)
        self.progress.activity = ""
        if better is not None:
            with self.start.phase("first checkpoint"):
                self.save(best=better)

    def save(self, best: bool = False) -> None:
        """Save a checkpoint in the background, once the previous update is known to be good."""
        self._finish_previous()
        self.updates.flush()
        values = counters(self.context, self.state, self.guard)
        self.saver.save(lambda stage: gather(self.learner, values, stage), best)
