"""Job: one training run, with its data, model, recipe and run options. Importing this file does not import torch."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fathoms.errors import ConfigError, flag_of
from fathoms.machine.devices import check_device
from fathoms.models.config import ViTConfig
from fathoms.names.config_checks import check_field
from fathoms.train.identity import config_identity, policy_identity, recipe_identity
from fathoms.train.recipe.image_sizes import ImageSizes
from fathoms.train.recipe.recipe import Recipe


@dataclass(frozen=True)
class RunOptions:
    """Options of a run; those that decide its result are in `Job.identity`, such as the seed and the guard's policy."""

    output: str = "runs"
    """Folder of all runs."""
    experiment: str | None = None
    """Name of this run's folder; default: from the model, the data and the settings."""
    seed: int = 42
    """Random seed of weights, order and augmentation."""
    device: str = "auto"
    """auto, cpu or cuda."""
    workers: int = 0
    """Number of workers that decode images; 0: one per core."""
    worker_kind: Literal["auto", "threads", "processes"] = "auto"
    """Kind of the workers; auto: processes when training on a GPU, where threads would slow the loop, else threads."""
    max_bad: float = 0.01
    """Share of the images that may be unreadable; they are replaced, and more end the run."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume where the same command left off; never: refuse to touch an old run."""
    allow_change: tuple[str, ...] | None = None
    """Settings, such as lr or epochs, and "data", that may differ from the run being resumed; others may not."""
    initial_checkpoint: str | None = None
    """Weights to start from; position embeddings are resized to this run's image size."""
    initial_head: Literal["load", "new"] = "load"
    """Load the classifier from those weights too, or start a new one for other classes."""
    recovery_interval: int = 0
    """Also save every N updates; 0: after evaluations only."""
    checkpoint_hist: int = 2
    """Number of newest checkpoints to keep, besides the best."""
    eval_interval: int = 1
    """Evaluate and save every N epochs, and after the last."""
    probe_interval: int | None = None
    """Measure every block each N updates (probe.jsonl); 0: never. Default: as often as it takes 2 % of the time."""
    guard: Literal["stop", "skip", "rollback"] = "stop"
    """Action after an update whose loss or gradient is not finite, which never reaches the weights: stop the run
    (exit 3), skip its batches, or roll back to the last checkpoint, halve the learning rate and skip those batches."""
    guard_limit: int = 5
    """Largest number of updates skipped in a row, and of rollbacks in a run, before it stops."""
    spike_score: float = 10.0
    """A loss this many robust deviations above the median of the last 100 is a spike."""
    on_spike: Literal["log", "rollback"] = "log"
    """Log a spike in guard.jsonl, or also roll back as --guard rollback does."""
    fsdp: bool = False
    """Shard weights, moments and EMA over the ranks of torchrun (FSDP2); under bf16 each computes with a whole copy."""
    profile_start: bool = False
    """Print how long each phase of the start takes, from the command to the report, and keep it in start.json."""
    log: str | None = None
    """Trackers that get the metrics, separated by commas: tensorboard, wandb, mlflow, trackio."""
    swap_norms: str | None = None
    """Replace every norm of the model before training, such as by learnable_scaler."""

    def __post_init__(self) -> None:
        check_device(self.device)
        # A NaN is below no least, and would call every update a spike.
        check_field(RunOptions, "spike_score", self.spike_score, "--", ConfigError)
        for name, most in {"seed": 2**32 - 1, "workers": 1024}.items():
            if getattr(self, name) > most:
                raise ConfigError(f"{flag_of(name)} {getattr(self, name)}: use {most} or less")
        for name, least in {
            "seed": 0,
            "workers": 0,
            "recovery_interval": 0,
            "checkpoint_hist": 1,
            "eval_interval": 1,
            "probe_interval": 0,
            "guard_limit": 1,
            "spike_score": 0,
        }.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{flag_of(name)} {getattr(self, name)}: use {least} or more")
        if not 0 <= self.max_bad <= 1:
            raise ConfigError(f"--max-bad {self.max_bad}: is not a share; use 0 to 1")
        if self.allow_change and self.experiment is None:
            raise ConfigError("--allow-change: name the run to resume with --experiment")
        if self.initial_head == "new" and self.initial_checkpoint is None:
            raise ConfigError("--initial-head would not be used: it needs --initial-checkpoint; add that")
        if self.experiment is not None and not re.fullmatch(r"(?!\.+$)[\w.@=+-]{1,200}", self.experiment):
            raise ConfigError(f"--experiment {self.experiment!r}: use letters, digits and . _ - = + @ only")


@dataclass(frozen=True)
class Job:
    """One training run.

    Args:
        data: Path of the data; None is the embedded handwritten digits.
        model: A fathoms name, or "timm/NAME".
        config: The model's config; None for timm models.
        recipe: The training settings.
        run: The run options.
    """

    data: str | None
    model: str
    config: ViTConfig | None
    recipe: Recipe
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        # Sizes that cannot be are refused before anything is opened.
        _ = self.image_sizes

    @property
    def image_sizes(self) -> ImageSizes | None:
        """Sizes of the training images by epoch; None for timm models, which have one size."""
        text = self.recipe.progressive_size
        if self.config is None:
            if text is not None:
                raise ConfigError("--progressive-size acts on fathoms models only; leave it out")
            return None
        if text is not None and self.recipe.teacher is not None:
            raise ConfigError("--progressive-size: a teacher takes one image size; leave one of the two out")
        return ImageSizes(text, self.config.image_size, self.config.patch_size, self.recipe.epochs)

    def identity(self) -> dict[str, Any]:
        """Everything that was asked for and decides the result, and so must not change when a run resumes."""
        return {
            "data": self.data or "digits",
            "model": self.model,
            "seed": self.run.seed,
            "swap_norms": self.run.swap_norms,
            "initial_checkpoint": self.run.initial_checkpoint,
            # None as long as it changes nothing, so that runs from before it existed resume.
            "initial_head": None if self.run.initial_head == "load" else self.run.initial_head,
            "config": config_identity(self.config),
            "recipe": recipe_identity(self.recipe),
            **policy_identity(vars(self.run)),
        }

    def table(self) -> dict[str, Any]:
        """All settings, as in config.toml."""
        identity = self.identity()
        del identity["config"]
        config = {} if self.config is None else self.config.to_dict()
        model, recipe = {"name": self.model, **config}, self.recipe.to_dict()
        return {**identity, "model": model, "recipe": recipe, "run": vars(self.run)}

    @property
    def folder(self) -> Path:
        """The run's folder."""
        if self.run.experiment is not None:
            return Path(self.run.output) / self.run.experiment
        digest = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()
        stem = Path(self.data).name if self.data else "digits"
        name = re.sub(r"[^\w.-]+", "_", f"{self.model}-{stem}")
        return Path(self.run.output) / f"{name}-{digest[:8]}"
