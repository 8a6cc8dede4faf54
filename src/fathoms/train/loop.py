"""The training loop: epochs of batches and updates, each a pure function of the weights and a few counters.

Order, augmentation and drop-path follow from (seed, epoch, batch, rank), so a run that is stopped anywhere resumes as
if it had never stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from fathoms.data import Batch, LoaderError
from fathoms.models.vit import ViT
from fathoms.parts.residuals.prores import Warmup
from fathoms.train.checkpoint.async_saver import AsyncSaver
from fathoms.train.checkpoint.resume import roll_back
from fathoms.train.checkpoint.state_dict import counters, gather
from fathoms.train.context import RunContext, TrainState
from fathoms.train.epoch_end import EpochEnd, host_numbers, live_numbers
from fathoms.train.guard.actions import act_on
from fathoms.train.guard.policy import Guard, RollBack
from fathoms.train.learner import Learner
from fathoms.train.optim.schedule import Schedule
from fathoms.train.precision.cuda_graph import WARMUP
from fathoms.train.record.probing import Probing
from fathoms.train.record.progress_bar import Progress
from fathoms.train.record.start_profile import StartProfile
from fathoms.train.record.updates import UpdateLog
from fathoms.train.signals import StopRequest
from fathoms.train.step import Stepper


class Loop:
    """Trains epoch after epoch from where `state` stands: `begin`, then `run`.

    Args:
        context: The constants of the run.
        schedule: Its learning rates.
        learner: The model, its optimizer and what else trains it.
        stepper: Computes and applies the updates.
        start: The profile of the start, which notes the first updates.
        show: Whether progress is printed.
    """

    def __init__(
        self,
        context: RunContext,
        schedule: Schedule,
        learner: Learner,
        stepper: Stepper,
        start: StartProfile,
        show: bool,
    ) -> None:
        job, world, _, folder = context
        self.context, self.schedule, self.learner, self.stepper = context, schedule, learner, stepper
        self.start, self.show, self.sizes = start, show and world.is_main, job.image_sizes
        self.state = TrainState(torch.zeros(4, dtype=torch.float64, device=world.device))
        averaged = [] if learner.ema is None else [learner.ema.module]
        # The bfloat16 copy has the model's own buffers.
        self.warmup = Warmup(learner.model, *averaged)
        self.guard = Guard(job.run, scaled=learner.scaler.is_enabled())
        self.updates = UpdateLog(folder)
        every = 0 if job.run.fsdp else job.run.probe_interval
        self.probing = Probing(folder, learner.model, every, self.epochs * context.updates_per_epoch)
        self.saver = AsyncSaver(folder, job.run.checkpoint_hist, world.device, self.warn)
        self.stop = StopRequest()
        self.progress = Progress(0, 0, show=False)
        self.after_update: Callable[[], None] = lambda: None
        """Called after each update of this process."""
        self._updates_here = 0

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return self.context.job.recipe.total_epochs

    @property
    def _batches_done(self) -> int:
        return self.state.epoch * self.context.batches_per_epoch + self.state.batch

    def warn(self, line: str) -> None:
        """Print a warning beside the progress."""
        self.progress.say(f"warning: {line}")

    def begin(self) -> None:
        """Show progress from where the run stands, which is known once it has resumed."""
        total = self.epochs * self.context.batches_per_epoch
        self.progress = Progress(total, self._batches_done, self.show)

    def run(self, track: Callable[[dict[str, Any]], None]) -> int | None:
        """Train the epochs that are left; None, or the exit code that a signal asks for, once all is saved.

        Args:
            track: Takes every row of metrics.jsonl, for the trackers.
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
        """Save after the last finished update when the loader has failed, so that the run can be resumed from there.

        If that update is bad and would be rolled back, the checkpoint to return to is already there.
        """
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
            self.update(batch)
            self._mark_update()
            self.after_update()
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
        if self.sizes is not None and isinstance(self.learner.model, ViT):
            # The compute model may be a bfloat16 copy, which has a size of its own.
            for part in {self.learner.model, *self.learner.compute_model.modules()}:
                if isinstance(part, ViT):
                    part.set_image_size(self.sizes.at(epoch))
            self.context.data.train.set_size(self.sizes.at(epoch))

    def update(self, batch: Batch) -> None:
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
        images = batch.images[:, : self.stepper.channels]
        warning = self.probing.measure(images, batch.labels, self.learner.optimizer, place)
        if warning is not None:
            self.warn(warning)

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
