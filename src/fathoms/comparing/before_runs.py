"""What is fixed and checked before anything runs: options, settings, and every arm, built on the meta device."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fathoms.comparing.folder import Settings, shared_settings
from fathoms.comparing.plan import TIMED
from fathoms.comparing.slurm import SlurmOptions
from fathoms.comparing.statistics import noise_floor
from fathoms.data.sources.splits import Roles
from fathoms.errors import ConfigError, FathomsError
from fathoms.training.job import Job

ASSUMED_ERROR = 0.25
"""Share of wrong answers that the noise floor is planned with, before anything has run."""
UNFINISHED = 75
"""Exit code where the time is used up and cells are left: give the same command again."""


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
    looks: tuple[int, ...] = ()
    keep_arms: tuple[int, int] | None = None
    robustness: tuple[str, ...] = ()
    by: dict[str, Any] | None = None
    refit: Callable[..., Any] | None = None
    """With `by`: the design by the time that trials took, as `by.refit` finds it."""


def settings_of(options: Options, jobs: Sequence[Job], roles: Roles, fingerprint: str | None) -> Settings:
    """All that is fixed before the first run; without a fingerprint, the data's own."""
    held_out = roles.held_out()
    if held_out is None:
        raise ConfigError("--val-share 0: nothing is held out to compare on; use a share above zero")
    check_metric(options.metric, timed=roles.val is not None)
    floor, margin = _floor_and_margin(options, len(held_out))
    return Settings(
        command=options.command,
        base=shared_settings(jobs),
        data=jobs[0].data or "digits",
        fingerprint=fingerprint or roles.fingerprint(),
        images=len(held_out),
        classes=len(held_out.classes),
        largest_class=float(np.bincount(held_out.labels).max() / len(held_out)),
        metric=options.metric,
        margin=margin,
        floor=floor,
        baseline=options.baseline,
        paired=options.paired,
        keep=options.keep,
        split="val" if roles.test is None else "test",
        looks=options.looks,
        keep_arms=options.keep_arms,
    )


def check_metric(metric: str, timed: bool) -> None:
    """Refuse what no run is measured by; `timed` where there is a val to read seconds off."""
    name, _, target = metric.partition("=")
    if metric in ("top1", "loss"):
        return
    if name != TIMED or not target.replace(".", "", 1).isdigit() or not 0 < float(target) <= 100:
        raise ConfigError(f"--metric {metric!r}: use top1, loss, or {TIMED}=PERCENT such as {TIMED}=90")
    if not timed:
        raise ConfigError(
            f"--metric {metric}: it is read off val, and there is none; use a --val-share above zero"
        )


def _floor_and_margin(options: Options, images: int) -> tuple[float, float]:
    """The noise floor of the held-out images, and the smallest difference that matters."""
    if options.metric != "top1" and options.smallest_difference is None:
        raise ConfigError(
            f"--metric {options.metric}: the noise floor is one of accuracy; give --smallest-difference"
        )
    floor = 100.0 * noise_floor(ASSUMED_ERROR, images) if options.metric == "top1" else 0.0
    margin = 2 * floor if options.smallest_difference is None else options.smallest_difference
    if not 0 < margin < math.inf:
        raise ConfigError(f"--smallest-difference {margin}: use a finite number above zero")
    return floor, margin


def refuse_on_cpu(runs: Iterable[tuple[str, Job]]) -> None:
    """Refuse the first named run whose device or speed cannot be had on a machine without a GPU."""
    from fathoms.training.compiling import check_backend
    from fathoms.training.speed import Machine, choose

    for name, job in runs:
        try:
            if job.run.device.startswith("cuda"):
                raise ConfigError(f"--device {job.run.device}: there is no CUDA device; use --device cpu")
            speed = choose(job, Machine("cpu", "cpu"), batches=sys.maxsize).speed
            if speed.compiles:
                check_backend(speed.torchcompile)
        except FathomsError as error:
            raise ConfigError(f"arm {name!r}: {error}") from error


def refuse_contradictions(runs: Iterable[tuple[str, Job]], classes: int) -> list[str]:
    """Refuse the first named run whose model or schedule cannot be built; lines on the norms that are swapped."""
    import torch

    from fathoms.training.build import build_model, build_schedule

    built: set[str] = set()
    lines: list[str] = []
    for name, job in runs:
        try:
            build_schedule(job)
            if job.module is not None:
                # It is built already.
                continue
            config = None if job.config is None else job.config.to_dict()
            model = json.dumps([job.model, config, job.run.swap_norms, job.recipe.freeze], sort_keys=True)
            if model not in built:
                built.add(model)
                # Weights to start from are read by the run itself.
                run = replace(job.run, initial_checkpoint=None, initial_head="load")
                with torch.device("meta"):
                    said: list[str] = []
                    build_model(replace(job, run=run), classes, said)
                lines += [f"arm {name!r}: {line}" for line in said]
        except FathomsError as error:
            raise ConfigError(f"arm {name!r}: {error}") from error
    return lines
