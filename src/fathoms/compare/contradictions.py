"""Check every arm before anything runs: build its model once on the meta device."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace

from fathoms.errors import ConfigError, FathomsError
from fathoms.train.job import Job


def refuse_on_cpu(runs: Iterable[tuple[str, Job]]) -> None:
    """Refuse the first named run whose device or speed cannot be had on a machine without a GPU."""
    from fathoms.train.precision.compile import check_backend
    from fathoms.train.precision.speed import Machine, choose

    for name, job in runs:
        try:
            if job.run.device.startswith("cuda"):
                raise ConfigError(f"--device {job.run.device}: there is no CUDA device; use --device cpu")
            speed = choose(job, Machine("cpu", "cpu"), batches=sys.maxsize).speed
            if speed.compiles:
                check_backend(speed.torchcompile)
        except FathomsError as error:
            raise ConfigError(f"arm {name!r}: {error}") from error


def refuse_contradictions(runs: Iterable[tuple[str, Job]], classes: int) -> None:
    """Refuse the first named run whose model or schedule cannot be built."""
    import torch

    from fathoms.train.build import build_model, build_schedule

    built: set[str] = set()
    for name, job in runs:
        try:
            build_schedule(job)
            config = None if job.config is None else job.config.to_dict()
            model = json.dumps([job.model, config, job.run.swap_norms, job.recipe.freeze], sort_keys=True)
            if model not in built:
                built.add(model)
                # Weights to start from are read by the run itself.
                run = replace(job.run, initial_checkpoint=None, initial_head="load")
                with torch.device("meta"):
                    build_model(replace(job, run=run), classes)
        except FathomsError as error:
            raise ConfigError(f"arm {name!r}: {error}") from error
