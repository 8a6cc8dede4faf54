"""Cells of a comparison: one run each, keyed by its settings and the data's fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathoms.models.config import ViTConfig
from fathoms.train.identity import SPEED
from fathoms.train.job import Job, RunOptions
from fathoms.train.recipe.recipe import Recipe

ENDED = ("done", "diverged")
"""Statuses of runs that are never run again."""


@dataclass(frozen=True)
class Cell:
    """One run of one arm with one seed.

    Args:
        arm: The arm's name.
        settings: What makes the arm, by option.
        seed: Its seed.
        job: The run, whose folder lies in the comparison's.
        fingerprint: Of the data it is to be trained on.
        test: Whether the test set is evaluated at its end; a trial of tuning never touches it.
    """

    arm: str
    settings: Mapping[str, str]
    seed: int
    job: Job
    fingerprint: str
    test: bool = True

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.job.folder

    @property
    def architecture(self) -> str:
        """Equal for cells whose compiled code is the same."""
        recipe = self.job.recipe
        speed = (*(getattr(recipe, name) for name in SPEED), recipe.batch_size)
        config = None if self.job.config is None else self.job.config.to_dict()
        other = (self.job.run.swap_norms, recipe.grad_checkpointing)
        return json.dumps([self.job.model, config, speed, other], sort_keys=True)


def make_cell(
    arm: str, settings: Mapping[str, str], seed: int, job: Job, fingerprint: str, root: Path
) -> Cell:
    """A cell in the folder `root`, named by its arm, seed and a digest of all that decides its result."""
    # A worker sees one GPU alone, whatever its number on this machine.
    device = job.run.device.partition(":")[0]
    run = dataclasses.replace(job.run, seed=seed, device=device, output=str(root), experiment=None)
    run = dataclasses.replace(run, allow_change=None)
    job = dataclasses.replace(job, run=run)
    # A name that begins with a dot is hidden.
    stem = re.sub(r"[^\w.=+-]+", "_", arm, flags=re.ASCII).strip("_").lstrip("._")[:80] or "arm"
    run = dataclasses.replace(run, experiment=f"{stem}-seed{seed}-{key_of(job, fingerprint)[:10]}")
    return Cell(arm, dict(settings), seed, dataclasses.replace(job, run=run), fingerprint)


def key_of(job: Job, fingerprint: str) -> str:
    """A digest of all that decides a run's result; the data count by their fingerprint, not their path."""
    identity = {**job.identity(), "data": fingerprint}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def job_to_json(job: Job) -> dict[str, Any]:
    """A job as plain data, for a worker process."""
    config = None if job.config is None else job.config.to_dict()
    return {
        "data": job.data,
        "model": job.model,
        "config": config,
        "recipe": job.recipe.to_dict(),
        "run": vars(job.run),
    }


def job_from_json(table: Mapping[str, Any]) -> Job:
    """The job that `job_to_json` wrote down."""
    config = None if table["config"] is None else ViTConfig(**_tuples(table["config"]))
    recipe, run = Recipe(**_tuples(table["recipe"])), RunOptions(**_tuples(table["run"]))
    return Job(table["data"], table["model"], config, recipe, run)


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
