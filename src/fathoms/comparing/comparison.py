"""One comparison from its arms to its results: plan, try values, run what each look asks for, gather, judge."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from fathoms.comparing.before_runs import UNFINISHED as UNFINISHED
from fathoms.comparing.before_runs import Options, refuse_contradictions, refuse_on_cpu, settings_of
from fathoms.comparing.folder import VERSION, Cell, ComparisonFolder, key_of, make_cell, own_settings, stale
from fathoms.comparing.plan import check_baseline
from fathoms.comparing.progress import Progress, Show
from fathoms.comparing.results import arms_of, gather, judged, rules_of, write_results
from fathoms.comparing.robustness import add_scores, lacking, open_sets
from fathoms.comparing.runner import PassSignals, Runner, make_slots, order
from fathoms.comparing.slurm import Submission
from fathoms.comparing.slurm_task import Task
from fathoms.comparing.tuning import Trial, Tuning, chosen_before, tuning_file, tuning_lines
from fathoms.comparing.verdicts import wanted_seeds
from fathoms.data.readiness import check_trainable
from fathoms.data.sources.splits import check_split, open_roles
from fathoms.errors import ConfigError
from fathoms.machine import visible_gpus
from fathoms.training.job import Job

if TYPE_CHECKING:
    from fathoms.comparing.in_process import InProcess, Modules


AnyRunner = Union[Runner, Submission, "InProcess"]


class Comparison:
    """Arms × seeds on one data set.

    Args:
        arms: Name, settings and run of every arm; the runs differ in nothing but the settings.
        seeds: Most seeds of each arm, counted from 0.
        folder: Where everything goes.
        options: How arms are compared and run.
        tuning: The grid that is tried for each arm first; None without one.
        notes: Lines for the user that belong to the plan.
        modules: What makes the modules of arms, where Python code gives it; all cells are then trained here.
    """

    def __init__(
        self,
        arms: Mapping[str, tuple[dict[str, str], Job]],
        seeds: int,
        folder: Path,
        options: Options,
        tuning: Tuning | None = None,
        notes: Sequence[str] = (),
        modules: Modules | None = None,
    ) -> None:
        self.arms, self.seeds, self.options = arms, seeds, options
        self.notes, self.modules = notes, modules
        self.folder = ComparisonFolder(folder)
        if options.baseline is not None:
            check_baseline(options.baseline, self.settings_of_arms())
        first = next(iter(arms.values()))[1]
        roles = open_roles(first.data, first.recipe.val_share)
        # Data that every run would refuse is refused here, before the plan is fixed to it.
        check_trainable(first.data, roles)
        self.split = roles.split()
        self.sets = open_sets(options, roles.train.classes, modules is not None)
        self.earlier = self.folder.plan()
        if tuning is not None and roles.val is None:
            raise ConfigError(
                "--val-share 0: --tune chooses on val, and there is none; use a share above zero"
            )
        self.tuning = tuning
        if tuning is not None and roles.val is not None:
            val = roles.val
            largest = float(np.bincount(val.labels).max() / len(val))
            # Values are chosen by what a whole run reaches, also where runs are timed.
            metric = "loss" if options.metric == "loss" else "top1"
            self.tuning = dataclasses.replace(tuning, metric=metric, images=len(val), largest=largest)
        # Cells are named by the fingerprint: a comparison that began with an earlier kind of it keeps using it.
        stored = (self.earlier or {}).get("fingerprint")
        same = isinstance(stored, str) and stored == roles.fingerprint()
        self.settings = settings_of(
            options, [job for _, job in arms.values()], roles, str(stored) if same else None
        )
        if self.earlier is not None:
            now, changed = self.plan(), "" if same else roles.changes(stored)
            self.folder.refuse_other(self.earlier, now, changed)
            # Other values would replace finished runs.
            if now["tune"] != self.earlier["tune"] and self.folder.scores_known():
                raise ConfigError(
                    f"{self.folder.path}: runs have ended, so their scores are known, and what --tune tries can no "
                    "longer change; choose another --experiment"
                )
        self.tuned: list[dict[str, Any]] = []

    def cells(self, tuned: Mapping[str, Mapping[str, str] | None] | None = None) -> list[Cell]:
        """Every cell, arm by arm; `tuned` holds the values that were chosen for each arm."""
        jobs: list[tuple[str, dict[str, str], Job]] = []
        for name, (settings, job) in self.arms.items():
            chosen = (tuned or {}).get(name)
            if chosen and self.tuning is not None:
                job = self.tuning.made(name, {**settings, **chosen})
            jobs.append((name, settings, job))
        fingerprint, root = self.settings.fingerprint, self.folder.cells
        return [
            make_cell(name, settings, seed, job, fingerprint, root)
            for name, settings, job in jobs
            for seed in range(self.seeds)
        ]

    def trials(self) -> list[Trial]:
        """The runs that tune each arm; none without --tune."""
        if self.tuning is None:
            return []
        return self.tuning.trials(self.settings_of_arms(), self.settings.fingerprint, self.folder)

    def settings_of_arms(self) -> dict[str, dict[str, str]]:
        return {name: settings for name, (settings, _) in self.arms.items()}

    def plan(self) -> dict[str, Any]:
        """The plan as plan.json holds it."""
        grid = {} if self.tuning is None else {key: list(values) for key, values in self.tuning.grid.items()}
        return {
            **vars(self.settings),
            "command": list(self.settings.command),
            "looks": list(self.settings.looks),
            "keep_arms": None if self.settings.keep_arms is None else list(self.settings.keep_arms),
            "version": VERSION,
            "arms": self.settings_of_arms(),
            "own": {name: own_settings(job, self.settings.base) for name, (_, job) in self.arms.items()},
            "keys": {name: key_of(job, self.settings.fingerprint) for name, (_, job) in self.arms.items()},
            "seeds": self.seeds,
            "tune": grid,
            "tune_epochs": None if self.tuning is None else self.tuning.epochs,
            "by": self.options.by,
        }

    def check(self) -> None:
        """Refuse arms and trials that contradict themselves."""
        runs = [(name, job) for name, (_, job) in self.arms.items()]
        runs += [(trial.cell.arm, trial.cell.job) for trial in self.trials()]
        lacking(self.cells(), self.sets)
        self.notes = (*self.notes, *refuse_contradictions(runs, self.settings.classes))
        # A GPU is left to the workers: looking at it here would take memory of it.
        if self.options.slurm is None and not visible_gpus(runs[0][1].run.device):
            refuse_on_cpu(runs)

    def run(self, say: Callable[[str], None], show: Show | None = None) -> tuple[dict[str, Any], int]:
        """Run what is missing of this shard, gather and judge; the results and the exit code."""
        with self.folder.locked(self.options.shard):
            plan = self.folder.begin(self.plan())
            check_split(self.folder.path / "split.json", self.split)
            if self.split is not None and not (self.folder.path / "split.json").is_file():
                self.folder.write("split.json", json.dumps(self.split) + "\n")
            if len(plan["grown"]) > len((self.earlier or {}).get("grown", [])):
                say("the plan grew: only what was added is run, and plan.json says so")
            return self.work(plan, say, show)

    def work(
        self, plan: Mapping[str, Any], say: Callable[[str], None], show: Show | None = None
    ) -> tuple[dict[str, Any], int]:
        """The same in a folder that is held: trials until each arm has its values, then cells until all is decided."""
        self.start(plan, say, show)
        runner = self.make_runner(self.progress)
        try:
            with PassSignals(runner) as signals:
                self._tune(runner)
                self._refit(runner)
                if self.ready:
                    self._seeds(runner)
                    add_scores(self.cells(self.chosen), self.sets, runner, self.progress.say)
                elif not runner.stopping.is_set():
                    whose = "" if self.options.shard == (1, 1) else " of other shards"
                    self.progress.say(f"trials{whose} are missing: the runs follow once they are there")
        finally:
            self.progress.close()
        results = self.refresh()
        with self.folder.writing():
            tried = [trial.cell for trial in self.trials()]
            self.folder.write("timings.json", self.progress.timings([*tried, *self.cells(self.chosen)]))
        return results, 128 + signals[0] if signals else self._exit_code()

    def start(self, plan: Mapping[str, Any], say: Callable[[str], None], show: Show | None = None) -> None:
        """Take a plan as it is written, and whom to tell."""
        self.written = plan
        self.progress = Progress(self.folder, len(self.slots()), self.options.keep, say, self._answer, show)

    def make_runner(self, progress: Progress) -> AnyRunner:
        """What trains the cells: workers here, this process, or jobs on a cluster."""
        options, seconds = self.options, self.options.seconds
        if options.slurm is not None:
            task = Task(str(self.folder.path), options.keep, options.jobs, options.per_gpu)
            return Submission(self.folder, options.slurm, task, progress.say)
        if self.modules:
            from fathoms.comparing.in_process import InProcess

            return InProcess(self.modules, progress, seconds)
        deadline = None if seconds is None else time.monotonic() + seconds
        return Runner(self.slots(), self.folder.own(self.folder.path / "logs"), progress, deadline)

    @property
    def ready(self) -> bool:
        """Whether each arm has its values."""
        return self.tuning is None or bool(self.tuned)

    @property
    def chosen(self) -> dict[str, dict[str, str] | None]:
        return {arm["name"]: arm["best"] for arm in self.tuned}

    def _tune(self, runner: AnyRunner) -> None:
        """Try values until no arm asks for a further one, and choose."""
        if self.tuning is None:
            return
        # Choices whose file is gone are those of the trials that are there, before any is tried again.
        self._choose()
        told = False
        while True:
            settled = {arm["name"] for arm in self._settled()}
            trials = self.trials()
            kept = {trial.cell.folder for trial in trials if trial.arm in settled}
            tried = [trial.cell for trial in trials]
            missing = stale(tried, self.folder)
            if not told and any(cell.folder in kept for cell in missing):
                self.progress.say(
                    "runs have ended, so their scores are known: what was chosen stays, "
                    "and trials that failed are not tried again"
                )
            if not self._work(runner, tried, tried, more=self.cells(), kept=kept, quiet=told):
                break
            told = True
        if self._choose():
            self._say(self.tuned)

    def _refit(self, runner: AnyRunner) -> None:
        """With --by: seeds, looks and arms to drop once more, by the time that trials took, while no score is known."""
        refit = self.options.refit
        if refit is None or runner.deadline is None or runner.stopping.is_set():
            return
        if design := refit(self, self.progress.rates, runner.deadline - time.monotonic()):
            self.seeds = design.seeds
            self.settings = dataclasses.replace(self.settings, looks=design.looks, keep_arms=design.keep)
            self.written = self.folder.begin(self.plan())
            self.progress.say(f"by the time that trials took: {design}; this stays")

    def _choose(self) -> bool:
        """Choose each arm's values once all trials ended or failed; whether that is so."""
        assert self.tuning is not None
        settled = {arm["name"]: arm for arm in self._settled()}
        open_ = [trial for trial in self.trials() if trial.arm not in settled]
        if any(not self.folder.status(trial.cell) for trial in open_):
            return False
        found = settled | {arm["name"]: arm for arm in self.tuning.choose(open_, self.folder)}
        self.tuned = [found[name] for name in self.arms]
        self.folder.write("tuning.json", tuning_file(self.tuned, self.tuning))
        return True

    def _say(self, tuned: Sequence[Mapping[str, Any]]) -> None:
        for line in tuning_lines(tuned, "of loss" if self.options.metric == "loss" else "points"):
            self.progress.say(line)

    def _lower(self) -> bool:
        """Give arms of which a whole run diverged the next lower value that trained; whether there was one."""
        if self.tuning is None:
            return False
        lowered = False
        cells = self.cells(self.chosen)
        for arm in self.tuned:
            own = [self.folder.status(cell) for cell in cells if cell.arm == arm["name"]]
            if any(status.get("status") == "diverged" for status in own):
                value = self.tuning.lowered(arm)
                if value is not None:
                    arm["replaced"] = [*arm["replaced"], arm["best"]]
                    arm["best"], lowered = {**arm["best"], **value}, True
        if lowered:
            self.folder.write("tuning.json", tuning_file(self.tuned, self.tuning))
        return lowered

    def _seeds(self, runner: AnyRunner) -> None:
        """Run what the next look asks for, until nothing is asked for."""
        quiet = False
        while True:
            while self._lower():
                self._say([arm for arm in self.tuned if arm["replaced"]])
            wanted, cells = self.wanted(), self.cells(self.chosen)
            asked = {cell.folder for cell in wanted}
            more = [cell for cell in cells if cell.folder not in asked]
            if not self._work(runner, wanted, cells, more=more, quiet=quiet):
                return
            quiet = True

    def wanted(self) -> list[Cell]:
        """The cells that the looks ask for by now."""
        cells = self.cells(self.chosen)
        rows = gather(cells, self.folder, self.written)
        rules = rules_of(rows, self.written, self.tuned)
        wanted = wanted_seeds(arms_of(rows, self.written, self.folder.path, self.tuned), rules, self.seeds)
        return [cell for cell in cells if cell.seed < wanted[cell.arm]]

    def refresh(self) -> dict[str, Any]:
        """Gather and judge what is there, and write it."""
        # Held, so that a shard that gathered earlier does not replace the results of one that wrote meanwhile.
        with self.folder.writing():
            rows = gather(self.cells(self.chosen), self.folder, self.written)
            results = judged(rows, self.written, self.folder.path, self.tuned)
            if self.tuned:
                kept = ("name", "best", "rule", "luck", "edge", "replaced", "failed")
                results["tuning"] = [{key: arm[key] for key in kept} for arm in self.tuned]
            write_results(self.folder, results)
        return results

    def _answer(self) -> str:
        """The answer so far; none while values are still tried, which are not runs of the comparison."""
        # Why it is exploratory is said at the end, not after every run.
        answer = str(self.refresh()["answer"]).partition("; exploratory:")[0]
        return answer if self.ready else ""

    def _settled(self) -> list[dict[str, Any]]:
        """The arms of tuning.json once a run of the comparison has ended.

        Another choice then would follow the scores on test, and throw finished runs away.
        """
        arms = [arm for arm in chosen_before(self.folder) if arm["name"] in self.arms]
        for arm in arms:
            for best in (arm["best"], *arm["replaced"]):
                cells = [cell for cell in self.cells({arm["name"]: best}) if cell.arm == arm["name"]]
                if len(stale(cells, self.folder)) < len(cells):
                    return arms
        return []

    def _work(
        self,
        runner: AnyRunner,
        cells: Sequence[Cell],
        whole: Sequence[Cell],
        more: Sequence[Cell] = (),
        kept: Collection[Path] = (),
        quiet: bool = False,
    ) -> bool:
        """Run the cells of this shard that are missing, but for those in `kept`; whether something came of it.

        `whole` is what shards share out, `more` may follow, and `quiet` is a further round of one command.
        """
        for cell in cells:
            self.folder.own(cell.folder)
        missing = stale(cells, self.folder)
        if len(cells) > len(missing) and not quiet:
            self.progress.say(f"{len(cells) - len(missing)} of {len(cells)} runs are there already")
            if self.written["keep"] == self.options.keep:
                # A comparison that was killed may not have come to it.
                left = {cell.folder for cell in missing}
                for cell in cells:
                    if cell.folder not in left:
                        self.folder.prune(cell, self.options.keep)
        ours = [cell for cell in self._share(missing, whole) if cell.folder not in kept]
        if quiet:
            # A run that failed a moment ago is tried again by the next command, not by this one.
            ours = [cell for cell in ours if not self.folder.status(cell)]
        self.progress.ahead = [*ours, *stale(more, self.folder)]
        before = [self.folder.status(cell) for cell in ours]
        if not runner.stopping.is_set():
            runner.run(order(ours, len(self.gpus)))
        after = [self.folder.status(cell) for cell in ours]
        return after != before and not runner.stopping.is_set()

    def _share(self, missing: Sequence[Cell], cells: Sequence[Cell]) -> list[Cell]:
        """The missing cells of this shard, which is the same share of all cells whatever is missing."""
        share, shares = self.options.shard
        own = {cell.folder for cell in cells[share - 1 :: shares]}
        return [cell for cell in missing if cell.folder in own]

    def _exit_code(self) -> int:
        """0 once every cell of this shard ended, 1 if one failed, 75 if cells are left."""
        tried, wanted = [trial.cell for trial in self.trials()], self.wanted()
        left = [*self._share(stale(tried, self.folder), tried)]
        left += self._share(stale(wanted, self.folder), self.cells(self.chosen))
        failed = [cell for cell in left if self.folder.status(cell).get("status") == "failed"]
        settled = {arm["name"] for arm in self._settled()}
        gone = {trial.cell.folder for trial in self.trials() if trial.arm in settled}
        waiting = [cell for cell in left if cell not in failed and cell.folder not in gone]
        unscored = self.ready and lacking(self.cells(self.chosen), self.sets)
        return UNFINISHED if waiting or unscored else 1 if failed else 0

    def slots(self) -> list[dict[str, str]]:
        return make_slots(self.options.jobs, self.gpus, self.options.per_gpu)

    @property
    def gpus(self) -> list[str]:
        return visible_gpus(next(iter(self.arms.values()))[1].run.device)
