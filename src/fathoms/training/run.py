"""One run from its job to its summary: built, resumed, trained epoch after epoch, ended.

Order, augmentation and drop-path follow from (seed, epoch, batch, rank), so a run that is stopped anywhere resumes as
if it had never stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fathoms.data import Batch, LoaderError
from fathoms.data.sources.splits import Roles, check_split
from fathoms.errors import ConfigError, FathomsError, unforeseen
from fathoms.parts.residual_updates import Warmup
from fathoms.text_table import wrapped
from fathoms.training.build import build_data, build_model, build_schedule
from fathoms.training.checkpoint_load import recorded_speed, resume, roll_back
from fathoms.training.checkpoint_save import AsyncSaver, counters, gather
from fathoms.training.distributed import (
    VOTES,
    StopRequest,
    World,
    check_agreement,
    naming_lost_ranks,
    raise_on_all,
)
from fathoms.training.guard import DivergedError, Guard, RollBack, act_on
from fathoms.training.job import Job
from fathoms.training.learner import Learner, RunContext, TrainState, build_learner
from fathoms.training.measurements import EpochEnd, Probing, not_finite, opening, resumed, write_summary
from fathoms.training.objective import Objective
from fathoms.training.optimization import Schedule
from fathoms.training.progress_bar import Progress
from fathoms.training.run_folder import DIVERGED, FAILED, Outcome, RunFolder, dumps
from fathoms.training.speed import device_name, set_stream, settle
from fathoms.training.step import Stepper, UpdateLog
from fathoms.training.trackers import RunInfo, Trackers, parse_trackers


class Loop:
    """Trains epoch after epoch from where `state` stands: `begin`, then `run`."""

    def __init__(
        self, context: RunContext, schedule: Schedule, learner: Learner, stepper: Stepper, show: bool
    ) -> None:
        job, world, data, folder = context
        self.context, self.schedule, self.learner, self.stepper = context, schedule, learner, stepper
        self.is_main, self.sizes = world.is_main, job.image_sizes
        self.show = show and self.is_main
        self.epochs, self.batches = job.recipe.total_epochs, data.train.batches
        self.updates_per_epoch = context.updates_per_epoch
        self.state = TrainState(torch.zeros(4, dtype=torch.float64, device=world.device))
        averaged = [] if learner.ema is None else [learner.ema.module]
        # The bfloat16 copy has the model's own buffers.
        self.warmup = Warmup(learner.model, *averaged)
        self.guard = Guard(job.run, scaled=learner.scaler.is_enabled())
        self.updates = UpdateLog(folder)
        every = 0 if job.run.fsdp else job.run.probe_interval
        self.probing = Probing(folder, learner.model, every, self.epochs * self.updates_per_epoch)
        self.saver = AsyncSaver(folder, job.run.checkpoint_hist, world.device, self.warn)
        self.stop = StopRequest()
        self.progress = Progress(0, show=False)
        # Batches of this epoch and time when this process began it, and the time of the latest update.
        self._first, self._began, self._since = 0, 0.0, 0.0
        self.after_update: Callable[[], None] = lambda: None
        """Called after each update of this process."""

    def warn(self, line: str) -> None:
        self.progress.say(f"warning: {line}")

    def begin(self) -> None:
        """Show progress from where the run stands, which is known once it has resumed."""
        self.progress = Progress(self.epochs * self.batches, self.show, self._done, self.numbers)

    def _done(self) -> int:
        return self.state.epoch * self.batches + self.state.batch

    def rate(self) -> float:
        """Images a second of this epoch on all ranks."""
        images = (self.state.batch - self._first) * self.context.data.train.sampler.global_batch
        return images / max(self._since - self._began, 1e-9)

    def numbers(self) -> dict[str, str]:
        """The numbers of the progress line, all of which the host knows already; none before the first update."""
        state, loss = self.state, self.updates.recent()
        if loss is None:
            return {}
        return {
            "epoch": f"{min(state.epoch + 1, self.epochs)}/{self.epochs}",
            "update": f"{state.updates}",
            "loss": f"{loss:.3f}",
            "images/s": f"{self.rate():,.0f}",
            **self.updates.live(),
            **self.probing.live,
            "data wait": f"{self.context.data.train.stats.wait_share:.0%}",
        }

    def run(self, track: Callable[[dict[str, Any]], None] | None) -> int | None:
        """Train the epochs that are left; None, or the exit code that a signal asks for, once all is saved.

        `track` takes every row of metrics.jsonl, for the trackers.
        """
        amp_dtype, channels = self.stepper.amp_dtype, self.stepper.channels
        say = self.progress.say
        self.epoch_end = EpochEnd(self.context, self.learner, self.state, channels, amp_dtype, say, track)
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
                say("a signal came: saving, then ending; the same command resumes")
                self.save()
                self.saver.wait()
                return self.stop_code
        self.saver.wait()
        return None

    def test(self) -> dict[str, Any] | None:
        """Evaluate the last weights on the test split; None without one."""
        self.progress.activity = "evaluating"
        return self.epoch_end.test(self._lr(back=1e-9))

    @property
    def stop_code(self) -> int | None:
        """The exit code that a signal asks for; with several ranks, once all of them know."""
        return self.stop.code if self.context.world.size == 1 else self.stop.agreed

    def _save_finished_updates(self) -> None:
        """Save after the last finished update when the loader has failed, unless it is bad and would be rolled back."""
        if self.context.world.size == 1:
            self.state.batch -= self.state.batch % self.context.job.recipe.grad_accum_steps
            self.stepper.abandon()
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
        where = f"back in epoch {self.state.epoch + 1}, after update {self.state.updates}"
        self.progress.say(f"rolled back: {where}, learning rate x {self.guard.lr_factor}")

    def _run_epoch(self) -> None:
        job, _, data, _ = self.context
        batches, accumulate = self.batches, job.recipe.grad_accum_steps
        interval, state, saver = job.run.recovery_interval, self.state, self.saver
        self._first, self._began = state.batch, time.monotonic()
        self._since = self._began
        if self.sizes is not None:
            self.stepper.set_image_size(self.sizes.at(state.epoch))
            data.train.set_size(self.sizes.at(state.epoch))
        for batch in data.train.epoch(state.epoch, state.batch):
            # The batches left over at the end of an epoch make a smaller update.
            full = state.batch < batches - batches % accumulate
            parts = accumulate if full else batches % accumulate
            if state.updates not in self.guard.passed_over:
                self.warmup.set(state.updates / (self.epochs * self.updates_per_epoch))
                self.stepper.accumulate(batch, parts, first=state.batch % accumulate == 0)
            state.batch += 1
            if state.batch % accumulate and state.batch < batches:
                continue
            if saver.news:
                saver.check()
            self.update(batch)
            self.after_update()
            self._count_time()
            if interval and state.updates % interval == 0 and state.batch < batches:
                self.save()
            if self.stop_code is not None and state.batch < batches:
                # The last update may ask for a rollback, which comes before the last save.
                self._finish_previous()
                return
        self._finish_previous()
        self._count_time()
        self._finish_epoch(self.rate())

    def _count_time(self) -> None:
        now = time.monotonic()
        self.state.seconds, self._since = self.state.seconds + now - self._since, now

    def update(self, batch: Batch) -> None:
        """Apply the accumulated gradients, unless the guard passes over this update."""
        state = self.state
        if state.updates in self.guard.passed_over:
            self._finish_previous()
            state.updates += 1
            return
        norm = self.stepper.gradient_norm()
        self._finish_previous()
        self.stepper.apply(state, norm, self._lr(), VOTES[self.stop.code])
        state.updates += 1
        spacing = self.probing.spacing
        if self.is_main and spacing and state.updates % spacing == 0 and self.probing.due(state.seconds):
            self._probe(batch)

    def _lr(self, back: float = 0.0) -> float:
        """The learning rate of this update; `back` is a fraction of an epoch to look back."""
        state, each = self.state, self.updates_per_epoch
        position = state.epoch + (state.updates - state.epoch * each) / each
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
        images = batch.images[:, : self.stepper.channels]
        warning = self.probing.measure(images, batch.labels, self.learner.optimizer, place)
        if warning is not None:
            self.warn(warning)

    def _finish_epoch(self, rate: float) -> None:
        self.progress.activity = "evaluating"
        better = self.epoch_end.finish(self.epochs, self._lr(back=1e-9), rate)
        self.progress.activity = ""
        if better is not None:
            self.save(best=better)

    def save(self, best: bool = False) -> None:
        """Save a checkpoint in the background, once the previous update is known to be good."""
        self._finish_previous()
        self.updates.flush()
        values = counters(self.context, self.state, self.guard)
        self.saver.save(lambda stage: gather(self.learner, values, stage), best)


class Trainer:
    """One run from its job to its summary: `Trainer(job, world).run()`.

    Args:
        show: Whether progress is printed.
        roles: The data by its roles, where it is open already; None opens it.
        module: The model, where it is not one that has a name.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        show: bool = True,
        roles: Roles | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self.tracker_names = parse_trackers(job.run.log) if job.run.log and world.is_main else ()
        schedule = build_schedule(job)
        data = build_data(job, world, roles)
        folder = RunFolder(job.folder, writes=world.is_main)
        self.context = context = RunContext(job, world, data, folder)
        self.model_lines: list[str] = []
        self.model = build_model(job, len(data.classes), self.model_lines, module, data.classes).to(
            world.device
        )
        if job.run.probe_interval and job.run.fsdp:
            raise ConfigError("--probe-interval works on models that are not sharded; leave it out")
        batches = job.recipe.total_epochs * data.train.batches
        speed, self.speed_lines = settle(job, world, batches, recorded_speed(folder.checkpoints))
        set_stream(self.model, speed.precision)
        objective = Objective(job.recipe, self.model, data.classes, world.device)
        self.learner = build_learner(job, world, self.model, objective, speed)
        channels = 3 if job.config is None else job.config.in_channels
        stepper = Stepper(job, world, self.learner, objective, channels, lambda line: self.loop.warn(line))
        self.loop = Loop(context, schedule, self.learner, stepper, show)

    def run(self) -> Outcome:
        """Train to the end, or until a signal or a non-finite number ends the run."""
        job, world, data, folder = self.context
        speed = {**vars(self.learner.speed), "device": device_name(world.device)}
        identity = dumps({"job": job.identity(), "data": data.fingerprint, "speed": speed})
        check_agreement(world, hashlib.sha256(identity.encode()).hexdigest())
        state = self.loop.state
        try:
            with raise_on_all(world):
                folder.open()
                if folder.writes:
                    self.loop.saver.reserve(self.learner, job.recipe.opt)
            notices = resume(self.context, self.learner, state, self.loop.guard)
            check_agreement(world, f"{state.epoch}/{state.batch}/{state.updates}", "another checkpoint")
            notices = [*resumed(self.context, state), *notices]
            if not {"data", "val_share"} & set(job.run.allow_change or ()):
                with raise_on_all(world):
                    check_split(folder.path / "split.json", data.roles.split())
            known = {"classes": list(data.classes), "roles": data.roles.sizes(), "speed": speed}
            table = {**job.table(), **known, "preprocessing": data.preprocessing.to_dict()}
            folder.write_config(table, resumed=state.updates > 0)
            folder.write_split(data.roles.split())
            return self._train(notices)
        except FathomsError:
            self.loop.saver.close()
            folder.discard()
            raise
        finally:
            self.loop.saver.close()
            folder.close()

    def about(self) -> list[str]:
        """The lines that a run begins with."""
        said = opening(self.context, self.model, self.learner.speed.precision)
        said += [*self.model_lines, *self.loop.schedule.notices(), *self.speed_lines]
        return [line for text in said for line in wrapped(text)]

    def _train(self, notices: list[str]) -> Outcome:
        job, world, _, folder = self.context
        loop = self.loop
        loop.begin()
        progress = loop.progress
        trackers: Trackers | None = None
        if self.tracker_names:
            info = RunInfo(folder.path, job.table(), loop.state.updates)
            trackers = Trackers(self.tracker_names, info, progress.say)
        for line in (*self.about(), *notices):
            progress.say(line)
        try:
            with naming_lost_ranks(world), loop.stop:
                stopped = loop.run(None if trackers is None else trackers.log)
                if stopped is not None:
                    return self._end("interrupted", stopped)
                test = loop.test()
            why = not_finite({"val": loop.state.last, "test": test})
            if why is None:
                return self._end("done", 0, test=test)
            progress.say(f"diverged: {why}")
            return self._end("diverged", DIVERGED, why, test)
        except DivergedError as error:
            progress.close()
            progress.say(f"diverged: {error}")
            return self._end("diverged", DIVERGED, str(error))
        except Exception as error:
            progress.close()
            why = str(error) if isinstance(error, FathomsError) else unforeseen(error)
            # A disk that could not take a checkpoint may still take a summary; the first error is what counts.
            with contextlib.suppress(Exception):
                self._end("failed", FAILED, why)
            raise
        finally:
            if trackers is not None:
                trackers.finish()
            progress.close()
            self._report_last_save()

    def _report_last_save(self) -> None:
        """A run that ends for another reason still reports that its last checkpoint was not written."""
        try:
            self.loop.saver.wait()
        except FathomsError as error:
            self.loop.warn(str(error))

    def _end(
        self, status: str, code: int, reason: str | None = None, test: dict[str, Any] | None = None
    ) -> Outcome:
        self.loop.updates.flush()
        guard = self.loop.guard.summary()
        summary = write_summary(self.context, self.loop.state, self.model, guard, status, reason, test)
        return Outcome(summary, code)
