"""Trainer: one run from its job to its summary, built, resumed, trained and ended."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

from fathoms.data.sources.splits import Roles, check_split
from fathoms.errors import ConfigError, FathomsError, unforeseen
from fathoms.text_table import plural
from fathoms.train.build import build_data, build_model, build_schedule
from fathoms.train.checkpoint.disk_space import check_room, file_sizes
from fathoms.train.checkpoint.resume import recorded_speed, resume
from fathoms.train.context import RunContext
from fathoms.train.distributed import World, check_agreement, naming_lost_ranks, raise_on_all
from fathoms.train.epoch_end import not_finite, write_summary
from fathoms.train.guard.policy import DivergedError
from fathoms.train.job import Job
from fathoms.train.learner import build_learner
from fathoms.train.loop import Loop
from fathoms.train.objective.objective import Objective
from fathoms.train.precision.machine import device_name, settle
from fathoms.train.precision.policy import set_stream
from fathoms.train.record.environment import describe_device
from fathoms.train.record.memory_note import memory_notes
from fathoms.train.record.run_folder import DIVERGED, FAILED, Outcome, RunFolder, dumps
from fathoms.train.record.start_profile import StartProfile
from fathoms.train.record.trackers import RunInfo, Trackers, parse_trackers
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
        schedule = build_schedule(job)
        data = build_data(job, world, roles)
        self.start.mark("data")
        folder = RunFolder(job.folder, writes=world.is_main)
        context = RunContext(job, world, data, folder)
        self.model = build_model(job, len(data.classes)).to(world.device)
        self.start.mark("model")
        if job.run.probe_interval and job.run.fsdp:
            raise ConfigError("--probe-interval works on models that are not sharded; leave it out")
        batches = job.recipe.total_epochs * context.batches_per_epoch
        speed, self.speed_lines = settle(job, world, batches, recorded_speed(folder.checkpoints))
        set_stream(self.model, speed.precision)
        objective = Objective(job.recipe, self.model, data.classes, world.device)
        self.learner = build_learner(job, world, self.model, objective, speed)
        channels = 3 if job.config is None else job.config.in_channels
        stepper = Stepper(job, world, self.learner, objective, channels)
        self.loop = Loop(context, schedule, self.learner, stepper, self.start, show)
        self.start.mark("optimizer and copies")

    @property
    def context(self) -> RunContext:
        """The constants of the run."""
        return self.loop.context

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
                self._check_room()
            notices = resume(self.context, self.learner, state, self.loop.guard)
            check_agreement(world, f"{state.epoch}/{state.batch}/{state.updates}", "another checkpoint")
            notices = [*self._resumed(), *notices, *self._memory_notes()]
            if not {"data", "val_share"} & set(job.run.allow_change or ()):
                with raise_on_all(world):
                    check_split(folder.path / "split.json", data.roles.split())
            known = {"classes": list(data.classes), "roles": data.roles.sizes(), "speed": speed}
            table = {**job.table(), **known, "preprocessing": data.preprocessing.to_dict()}
            folder.write_config(table, resumed=state.updates > 0)
            folder.write_split(data.roles.split())
            self.start.mark("run folder")
            return self._train(notices)
        except FathomsError:
            self.loop.saver.close()
            folder.discard()
            raise
        finally:
            self.loop.saver.close()
            folder.close()

    def _resumed(self) -> list[str]:
        """A line on where a run resumes; none for a new one."""
        state, epochs, name = self.loop.state, self.loop.epochs, self.context.folder.path
        if state.epoch >= epochs:
            return [
                f"{name} holds this run, done after {plural(state.epoch, 'epoch')}; nothing is left to train"
            ]
        if state.updates == 0:
            return []
        return [f"resumes in epoch {state.epoch + 1} of {epochs}, after update {state.updates}"]

    def _memory_notes(self) -> list[str]:
        """A line on memory that is not there; a GPU says so itself."""
        job, world, data, _ = self.context
        # A sharded model runs on all ranks or on none.
        if world.device.type != "cpu" or not world.is_main or job.run.fsdp:
            return []
        batch = min(job.recipe.batch_size, len(data.roles.train))
        return memory_notes(job, self.model, batch, self.learner.speed.precision)

    def _check_room(self) -> None:
        job, folder = self.context.job, self.context.folder
        if folder.writes:
            sizes = file_sizes(self.model, job.recipe.opt, self.learner.ema is not None)
            check_room(folder.checkpoints, sizes, job.run.checkpoint_hist)
            self.loop.saver.staging.reserve(sum(sizes.values()) + (1 << 22))

    def _train(self, notices: list[str]) -> Outcome:
        job, world, data, folder = self.context
        loop = self.loop
        loop.begin()
        progress = loop.progress
        info = RunInfo(folder.path, job.table(), loop.state.updates)
        trackers = Trackers(self.tracker_names, info, progress.say)
        about = (
            f"run folder: {folder.path}",
            data.train.describe(),
            f"splits: {data.roles.describe()}",
            f"device: {describe_device(world.device)}",
        )
        for line in (*about, *loop.schedule.notices(), *self.speed_lines, *data.notices, *notices):
            progress.say(line)
        try:
            with naming_lost_ranks(world), loop.stop:
                stopped = loop.run(trackers.log)
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
