"""One comparison from its arms to its results: plan, run what is missing, gather, judge."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathoms.compare.cells import Cell, key_of, make_cell
from fathoms.compare.contradictions import refuse_contradictions, refuse_on_cpu
from fathoms.compare.folder import VERSION, ComparisonFolder, Settings
from fathoms.compare.pairs import check_baseline
from fathoms.compare.progress import Show
from fathoms.compare.session import UNFINISHED as UNFINISHED
from fathoms.compare.session import Session
from fathoms.compare.slurm.submit import SlurmOptions
from fathoms.compare.tuning import Trial, Tuning
from fathoms.compare.workers.runner import make_slots
from fathoms.data.sources.splits import Roles, check_split, open_roles
from fathoms.data.tools.trainable import check_trainable
from fathoms.errors import ConfigError
from fathoms.machine.devices import visible_gpus
from fathoms.train.job import Job

ASSUMED_ERROR = 0.25
"""Share of wrong answers that the noise floor is planned with, before anything has run."""


@dataclass(frozen=True)
class Options:
    """How arms are compared and run; see the flags of `fathoms compare`."""

    command: tuple[str, ...]
    metric: str = "top1"
    smallest_difference: float | None = None
    baseline: str | None = None
    paired: bool = False
    keep: str = "last"
    jobs: int = 0
    per_gpu: int = 1
    shard: tuple[int, int] = (1, 1)
    seconds: float | None = None
    slurm: SlurmOptions | None = None


class Comparison:
    """Arms × seeds on one data set.

    Args:
        arms: Name, settings and run of every arm; the runs differ in nothing but the settings.
        seeds: Seeds of each arm, counted from 0.
        folder: Where everything goes.
        options: How arms are compared and run.
        tuning: The grid that is tried for each arm first; None without one.
        notes: Lines for the user that belong to the plan.
    """

    def __init__(
        self,
        arms: Mapping[str, tuple[dict[str, str], Job]],
        seeds: int,
        folder: Path,
        options: Options,
        tuning: Tuning | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.arms, self.seeds, self.options, self.tuning = arms, seeds, options, tuning
        self.notes = notes
        self.folder = ComparisonFolder(folder)
        if options.baseline is not None:
            check_baseline(options.baseline, self.settings_of_arms())
        first = next(iter(arms.values()))[1]
        roles = open_roles(first.data, first.recipe.val_share)
        # Data that every run would refuse is refused here, before the plan is fixed to it.
        check_trainable(first.data, roles)
        self.split = roles.split()
        self.earlier = self.folder.plan()
        # Cells are named by the fingerprint: a comparison that began with an earlier kind of it keeps using it.
        stored = (self.earlier or {}).get("fingerprint")
        same = isinstance(stored, str) and roles.has_fingerprint(stored)
        self.settings = self._settings(first.data, roles, str(stored) if same else None)
        if self.earlier is not None:
            changed = "" if same else roles.changes(stored)
            self.folder.refuse_other(self.earlier, self.plan(), changed)
            self._refuse_another_grid(self.earlier)

    def _settings(self, path: str | None, roles: Roles, fingerprint: str | None) -> Settings:
        """All that is fixed before the first run; without a fingerprint, the data's own."""
        options, held_out = self.options, roles.held_out()
        if held_out is None:
            raise ConfigError("--val-share 0: nothing is held out to compare on; use a share above zero")
        if self.tuning is not None and roles.val is None:
            raise ConfigError(
                "--val-share 0: --tune chooses on val, and there is none; use a share above zero"
            )
        floor, margin = _floor_and_margin(options, len(held_out))
        return Settings(
            command=options.command,
            base=shared_settings([job for _, job in self.arms.values()]),
            data=path or "digits",
            fingerprint=fingerprint or roles.fingerprint(),
            images=len(held_out),
            classes=len(held_out.classes),
            metric=options.metric,
            margin=margin,
            floor=floor,
            baseline=options.baseline,
            paired=options.paired,
            keep=options.keep,
            split="val" if roles.test is None else "test",
        )

    def _refuse_another_grid(self, earlier: Mapping[str, Any]) -> None:
        """Refuse values to tune that come after held-out scores are known: they would replace finished runs."""
        now = self.plan()
        if now["tune"] != earlier["tune"] and any(self.folder.cells.glob("*/summary.json")):
            raise ConfigError(
                f"{self.folder.path}: runs have ended, so their scores are known, and what --tune tries can no longer "
                "change; choose another --experiment"
            )

    def cells(self, tuned: Mapping[str, Mapping[str, str] | None] | None = None) -> list[Cell]:
        """Every cell, arm by arm; `tuned` holds the values that were chosen for each arm."""
        jobs: list[tuple[str, dict[str, str], Job]] = []
        for name, (settings, job) in self.arms.items():
            chosen = (tuned or {}).get(name)
            if chosen and self.tuning is not None:
                job = self.tuning.job(name, {**settings, **chosen})
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
        """The settings of each arm, by its name."""
        return {name: settings for name, (settings, _) in self.arms.items()}

    def plan(self) -> dict[str, Any]:
        """The plan as plan.json holds it."""
        grid = {} if self.tuning is None else {key: list(values) for key, values in self.tuning.grid.items()}
        return {
            **vars(self.settings),
            "command": list(self.settings.command),
            "version": VERSION,
            "arms": self.settings_of_arms(),
            "own": {name: own_settings(job, self.settings.base) for name, (_, job) in self.arms.items()},
            "keys": {name: key_of(job, self.settings.fingerprint) for name, (_, job) in self.arms.items()},
            "seeds": self.seeds,
            "tune": grid,
            "tune_epochs": None if self.tuning is None else self.tuning.epochs,
        }

    def check(self) -> None:
        """Refuse arms and trials that contradict themselves."""
        runs = [(name, job) for name, (_, job) in self.arms.items()]
        runs += [(trial.cell.arm, trial.cell.job) for trial in self.trials()]
        refuse_contradictions(runs, self.settings.classes)
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
            return Session(self, plan, say, show).run()

    def slots(self) -> list[dict[str, str]]:
        """The environments of the workers."""
        return make_slots(self.options.jobs, self.gpus, self.options.per_gpu)

    @property
    def gpus(self) -> list[str]:
        """The GPUs that the workers may use."""
        return visible_gpus(next(iter(self.arms.values()))[1].run.device)


def _floor_and_margin(options: Options, images: int) -> tuple[float, float]:
    """The noise floor of the held-out images, and the smallest difference that matters."""
    from fathoms.compare.statistics import noise_floor

    if options.metric == "loss" and options.smallest_difference is None:
        raise ConfigError("--metric loss: the noise floor is one of accuracy; give --smallest-difference")
    floor = 100.0 * noise_floor(ASSUMED_ERROR, images) if options.metric == "top1" else 0.0
    margin = 2 * floor if options.smallest_difference is None else options.smallest_difference
    if not 0 < margin < math.inf:
        raise ConfigError(f"--smallest-difference {margin}: use a finite number above zero")
    return floor, margin


def shared_settings(jobs: Sequence[Job]) -> dict[str, Any]:
    """Settings that all arms share, by name, without data and seed."""
    shared = _common([job.identity() for job in jobs])
    return {key: value for key, value in shared.items() if key not in ("data", "seed")}


def own_settings(job: Job, base: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one arm that not all arms share."""
    return _rest({key: value for key, value in job.identity().items() if key not in ("data", "seed")}, base)


def _rest(whole: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    for key, value in whole.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            rest[key] = _rest(value, base[key])
        elif key not in base:
            rest[key] = value
    return {key: value for key, value in rest.items() if value != {}}


def _common(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *rest = tables
    common: dict[str, Any] = {}
    for key, value in first.items():
        if isinstance(value, Mapping) and all(isinstance(other[key], Mapping) for other in rest):
            common[key] = _common([table[key] for table in tables])
        elif all(other.get(key) == value for other in rest):
            common[key] = list(value) if isinstance(value, tuple) else value
    return common
