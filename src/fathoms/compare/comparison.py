"""One comparison from its arms to its results: plan, run what is missing, gather, judge."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathoms.compare.cells import Cell, key_of, make_cell
from fathoms.compare.contradictions import refuse_contradictions, refuse_on_cpu
from fathoms.compare.folder import VERSION, ComparisonFolder, Settings, stale
from fathoms.compare.pairs import check_baseline, pairs_of
from fathoms.compare.progress import Show, span
from fathoms.compare.session import UNFINISHED as UNFINISHED
from fathoms.compare.session import Session
from fathoms.compare.slurm.submit import SlurmOptions
from fathoms.compare.tuning import FIRST_SEED, Trial, Tuning
from fathoms.compare.workers.runner import make_slots
from fathoms.data.sources.splits import check_split, open_roles
from fathoms.data.tools.trainable import check_trainable
from fathoms.errors import ConfigError
from fathoms.machine.devices import visible_gpus
from fathoms.text_table import plural
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
        from fathoms.compare.statistics import noise_floor

        self.arms, self.seeds, self.options, self.tuning = arms, seeds, options, tuning
        self.notes = notes
        self.folder = ComparisonFolder(folder)
        if options.baseline is not None:
            check_baseline(options.baseline, self.settings_of_arms())
        first = next(iter(arms.values()))[1]
        path, roles = first.data, open_roles(first.data, first.recipe.val_share)
        # Data that every run would refuse is refused here, before the plan is fixed to it.
        check_trainable(path, roles)
        held_out, self.split = roles.held_out(), roles.split()
        if held_out is None:
            raise ConfigError("--val-share 0: nothing is held out to compare on; use a share above zero")
        if tuning is not None and roles.val is None:
            raise ConfigError(
                "--val-share 0: --tune chooses on val, and there is none; use a share above zero"
            )
        classes, images = len(held_out.classes), len(held_out)
        if options.metric == "loss" and options.smallest_difference is None:
            raise ConfigError("--metric loss: the noise floor is one of accuracy; give --smallest-difference")
        floor = 100.0 * noise_floor(ASSUMED_ERROR, images) if options.metric == "top1" else 0.0
        margin = 2 * floor if options.smallest_difference is None else options.smallest_difference
        if not 0 < margin < math.inf:
            raise ConfigError(f"--smallest-difference {margin}: use a finite number above zero")
        self.earlier = self.folder.plan()
        # Cells are named by the fingerprint: a comparison that began with an earlier kind of it keeps using it.
        stored = (self.earlier or {}).get("fingerprint")
        same = isinstance(stored, str) and roles.has_fingerprint(stored)
        self.settings = Settings(
            command=options.command,
            base=shared_settings([job for _, job in arms.values()]),
            data=path or "digits",
            fingerprint=str(stored) if same else roles.fingerprint(),
            images=images,
            classes=classes,
            metric=options.metric,
            margin=margin,
            floor=floor,
            baseline=options.baseline,
            paired=options.paired,
            keep=options.keep,
            split="val" if roles.test is None else "test",
        )
        if self.earlier is not None:
            changed = "" if same else roles.changes(stored)
            self.folder.refuse_other(self.earlier, self.plan(), changed)
            self._refuse_another_grid(self.earlier)

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

    def describe(self) -> str:
        """The plan in words: arms, what differs, the noise floor, the smallest visible difference."""
        from fathoms.compare.statistics import ALPHA, MIN_SEEDS, detectable

        names, seeds, settings = list(self.arms), self.seeds, self.settings
        pairs = len(pairs_of(self.settings_of_arms(), self.options.baseline))
        varied = list(dict.fromkeys(name for arm, _ in self.arms.values() for name in arm))
        rest = " and in nothing else" if varied else ""
        unit = "points" if settings.metric == "top1" else "of loss"
        lines = [
            f"{plural(len(names), 'arm')} x {plural(seeds, 'seed')} = {plural(len(names) * seeds, 'run')}"
            f" in {self.folder.path}",
            *([f"arms differ in {', '.join(varied) or 'nothing'}{rest}:"] if pairs else []),
            *(f"  {name}" for name in names),
        ]
        if self.tuning is not None:
            choices, values = self.tuning.choices(), ", ".join(self.tuning.grid)
            lines.append(
                f"first {len(names)} x {len(choices)} trials of {values}, measured on val, seed {FIRST_SEED}"
            )
        lines.append(f"held out: {settings.images} images of {settings.classes} classes")
        lines += self.notes
        if self.options.per_gpu > 1 and not mps_runs():
            lines.append(
                f"--per-gpu {self.options.per_gpu}: NVIDIA's MPS does not run, so the runs of a GPU take turns;"
                " start it with nvidia-cuda-mps-control -d"
            )
        if not pairs:
            return "\n".join([*lines, "one arm: nothing is compared; add a value to --axis, or an --arm"])
        if seeds < MIN_SEEDS:
            return "\n".join([*lines, f"fewer than {MIN_SEEDS} seeds: there will be no verdict"])
        if not settings.floor:
            return "\n".join(lines)
        lines.append(f"noise floor {settings.floor:.2f} {unit} (at {ASSUMED_ERROR:.0%} error)")
        least = detectable(settings.floor, seeds, ALPHA / pairs)
        pair = "1 pair" if pairs == 1 else f"{pairs} pairs"
        lines.append(f"smallest difference these seeds show after correction for {pair}: {least:.2f} {unit}")
        return "\n".join(lines)

    def estimate(self, say: Callable[[str], None]) -> str:
        """Expected time and disk of what is missing, from a pilot: a few timed updates of each architecture."""
        from fathoms.compare.workers.pilot import expected, run_pilot

        slots = self.slots()
        missing = stale([*(trial.cell for trial in self.trials()), *self.cells()], self.folder)
        kinds = len({cell.architecture for cell in missing})
        say(f"timing a few updates of {plural(kinds, 'architecture')}; --no-pilot leaves this out")
        seconds, size = expected(missing, run_pilot(missing, slots[0]), len(slots))
        kept = {"none": 0, "last": 1}.get(
            self.options.keep, 1 + next(iter(self.arms.values()))[1].run.checkpoint_hist
        )
        at_a_time = "1 worker" if len(slots) == 1 else f"{len(slots)} workers"
        return (
            f"{plural(len(missing), 'run')} missing: about {span(seconds)} on {at_a_time},"
            f" {kept * size / 1e6:,.1f} MB of checkpoints kept"
        )

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


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service runs: kernels of several processes then share a GPU at the same time."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()
