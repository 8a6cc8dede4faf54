"""One comparison from its arms to its results: plan, run what is missing, gather, judge."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fathoms.compare.cells import Cell, make_cell
from fathoms.compare.folder import ComparisonFolder, Settings, stale
from fathoms.compare.progress import Progress
from fathoms.compare.results import gather, judged, write_results
from fathoms.compare.runner import Runner, make_slots, order
from fathoms.compare.slurm import SlurmOptions, Submission
from fathoms.compare.slurm_task import Task
from fathoms.data.sources.splits import open_splits
from fathoms.errors import ConfigError
from fathoms.registry import check_name
from fathoms.train.job import Job

UNFINISHED = 75
"""Exit code where the time is used up and cells are left: give the same command again."""
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
    """

    def __init__(
        self, arms: Mapping[str, tuple[dict[str, str], Job]], seeds: int, folder: Path, options: Options
    ) -> None:
        from fathoms.compare.statistics import noise_floor

        self.arms, self.seeds, self.options = arms, seeds, options
        self.folder = ComparisonFolder(folder)
        if options.baseline is not None:
            check_name(options.baseline, list(arms), "arm", "--baseline")
        path = next(iter(arms.values()))[1].data
        train, held_out = open_splits(path)
        classes, images = len(held_out.classes), len(held_out)
        floor = (100.0 if options.metric == "top1" else 1.0) * noise_floor(ASSUMED_ERROR, images)
        margin = 2 * floor if options.smallest_difference is None else options.smallest_difference
        if margin <= 0:
            raise ConfigError(f"--smallest-difference {margin}: use a number above zero")
        self.settings = Settings(
            command=options.command,
            base=shared_settings([job for _, job in arms.values()]),
            data=path or "digits",
            fingerprint=train.fingerprint() + held_out.fingerprint(),
            images=images,
            classes=classes,
            metric=options.metric,
            margin=margin,
            floor=floor,
            baseline=options.baseline,
            paired=options.paired,
        )

    def cells(self) -> list[Cell]:
        """Every cell, arm by arm."""
        return [
            make_cell(name, settings, seed, job, self.settings.fingerprint, self.folder.cells)
            for name, (settings, job) in self.arms.items()
            for seed in range(self.seeds)
        ]

    def describe(self) -> str:
        """The plan in words: arms, what differs, the noise floor, the smallest visible difference."""
        from fathoms.compare.statistics import ALPHA, MIN_SEEDS, detectable
        from fathoms.compare.verdicts import pairs_of

        names, seeds, settings = list(self.arms), self.seeds, self.settings
        pairs = len(pairs_of(names, self.options.baseline))
        varied = list(dict.fromkeys(name for arm, _ in self.arms.values() for name in arm))
        unit = "points" if settings.metric == "top1" else "of loss"
        lines = [
            f"{len(names)} arms x {seeds} seeds = {len(names) * seeds} runs in {self.folder.path}",
            f"arms differ in {', '.join(varied)} and in nothing else:",
            *(f"  {name}" for name in names),
            f"held out: {settings.images} images of {settings.classes} classes; noise floor"
            f" {settings.floor:.2f} {unit} (at {ASSUMED_ERROR:.0%} error)",
        ]
        if not pairs or seeds < MIN_SEEDS:
            return "\n".join([*lines, f"fewer than {MIN_SEEDS} seeds or two arms: there will be no verdict"])
        least = detectable(settings.floor, seeds, ALPHA / pairs)
        pair = "1 pair" if pairs == 1 else f"{pairs} pairs"
        lines.append(f"smallest difference these seeds show after correction for {pair}: {least:.2f} {unit}")
        return "\n".join(lines)

    def run(self, say: Callable[[str], None]) -> tuple[dict[str, Any], int]:
        """Run what is missing of this shard, gather and judge; the results and the exit code."""
        folder, own = self.folder, self.cells()
        with folder.locked():
            arms = {name: settings for name, (settings, _) in self.arms.items()}
            plan = folder.begin(self.settings, arms, self.seeds)
            missing = stale(own, folder)
            if len(own) > len(missing):
                say(f"{len(own) - len(missing)} of {len(own)} runs are there already")
            share, shares = self.options.shard
            ours = own[share - 1 :: shares]
            todo = order(cell for cell in missing if cell in ours)

            def refresh() -> dict[str, Any]:
                results = judged(gather(own, folder, plan), plan)
                write_results(folder, results)
                return results

            progress = Progress(folder, len(todo), self.options.keep, say, lambda: str(refresh()["answer"]))
            gpus = count_gpus(ours[0].job.run.device) if ours else 0
            slots = make_slots(self.options.jobs, gpus, self.options.per_gpu)
            runner: Runner | Submission = Runner(slots, folder.path / "logs", progress, self.options.seconds)
            if self.options.slurm is not None:
                task = Task(str(folder.path), self.options.keep, self.options.jobs, self.options.per_gpu)
                runner = Submission(folder, self.options.slurm, task, say)
            with PassSignals(runner) as signals:
                runner.run(todo)
            progress.close()
            results = refresh()
            folder.write("timings.json", progress.timings(own))
        return results, self._exit_code(stale(ours, folder), signals)

    def _exit_code(self, left: Sequence[Cell], signals: Sequence[int]) -> int:
        """0 once every cell of this shard ended, 1 if one failed, 75 if the time is used up."""
        if signals:
            return 128 + signals[0]
        failed = [cell for cell in left if self.folder.status(cell).get("status") == "failed"]
        return 1 if failed else UNFINISHED if left else 0


def shared_settings(jobs: Sequence[Job]) -> dict[str, Any]:
    """What all arms have in common, by name, without data and seed."""
    shared = _common([job.identity() for job in jobs])
    return {key: value for key, value in shared.items() if key not in ("data", "seed")}


def _common(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *rest = tables
    common: dict[str, Any] = {}
    for key, value in first.items():
        if isinstance(value, Mapping) and all(isinstance(other[key], Mapping) for other in rest):
            common[key] = _common([table[key] for table in tables])
        elif all(other.get(key) == value for other in rest):
            common[key] = list(value) if isinstance(value, tuple) else value
    return common


def count_gpus(device: str) -> int:
    """GPUs that workers may use, asked without loading torch."""
    if device == "cpu":
        return 0
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([gpu for gpu in shown.split(",") if gpu.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


class PassSignals:
    """Pass SIGINT, SIGTERM and SIGHUP on to the workers, so that they save; gives the list of those that came."""

    def __init__(self, runner: Runner | Submission) -> None:
        self.runner, self.came = runner, list[int]()

    def __enter__(self) -> list[int]:
        heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {sig: signal.signal(sig, self._hear) for sig in heard}
        return self.came

    def __exit__(self, *_: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)

    def _hear(self, sig: int, _frame: FrameType | None) -> None:
        self.came.append(sig)
        self.runner.stop()
