"""Job: one training run, with its data, model, recipe and run options. Importing this file does not import torch."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fathoms.config_checks import check_field, check_ranges, ranged
from fathoms.errors import ConfigError, flag_of
from fathoms.machine import check_device
from fathoms.models.config import ViTConfig, overridden
from fathoms.models.model_sources import TIMM, refuse_weights, resolve, resolve_weights
from fathoms.models.training_record import TrainingRecord, record_beside
from fathoms.models.zoo import ALIASES, IMAGENET, MODELS, data_config, model_config
from fathoms.registry import check_name
from fathoms.training.recipe import Recipe, read_recipe, recipe_options


@dataclass(frozen=True)
class ImageSizes:
    """Side of the training images by epoch, from text such as "0:128,100:160,200:224".

    Each part is the first epoch of a size, counted from 0. The last size must be the model's own, so that training
    ends at the size of evaluation.

    >>> sizes = ImageSizes("0:128,100:224", final=224, patch_size=16, epochs=300)
    >>> sizes.at(99), sizes.at(100)
    (128, 224)
    """

    text: str | None
    final: int
    patch_size: int
    epochs: int

    def __post_init__(self) -> None:
        if self.text is None:
            return
        starts = [start for start, _ in self.stages]
        where = f"--progressive-size {self.text}"
        if starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ConfigError(f"{where}: epochs must increase from 0")
        if starts[-1] >= self.epochs:
            raise ConfigError(
                f"{where}: epoch {starts[-1]} is beyond the {self.epochs} epochs of this run; start earlier"
            )
        for _, size in self.stages:
            if size < 1 or size % self.patch_size:
                raise ConfigError(f"{where}: {size} is not a multiple of the patch size {self.patch_size}")
        if self.stages[-1][1] != self.final:
            raise ConfigError(
                f"{where}: ends at {self.stages[-1][1]}, but the model's image size is {self.final}; end with that, or "
                f"give --image-size {self.stages[-1][1]}"
            )

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Pairs of first epoch and size, in order."""
        parts = (self.text or f"0:{self.final}").split(",")
        found = [re.fullmatch(r"\s*(\d{1,7}):(\d{1,5})\s*", part, re.ASCII) for part in parts]
        if not all(found):
            raise ConfigError(
                f"--progressive-size {self.text}: write EPOCH:SIZE, such as 0:128,100:160,200:224"
            )
        return [(int(match[1]), int(match[2])) for match in found if match]

    def at(self, epoch: int) -> int:
        return [size for start, size in self.stages if start <= epoch][-1]


def teacher_kind(teacher: str) -> str:
    """The kind of a teacher: "weights" for NAME=WEIGHTS, "timm", "path" or "hub"; anything else is an error."""
    name, equals, weights = teacher.partition("=")
    if os.path.exists(teacher):  # noqa: PTH110 - the name of a run folder may have an equals sign in it
        return "path"
    if weights:
        check_name(name, [*MODELS, *ALIASES], "model", "--teacher")
        resolve_weights(weights, f"--teacher {name}=")
        return "weights"
    found = resolve(name, "--teacher")
    if equals or found.kind == "zoo":
        raise ConfigError(
            f"--teacher {name}: an untrained teacher teaches noise; give --teacher {name}=WEIGHTS.safetensors"
        )
    return found.kind


DEFAULT_MODEL = "vit_small_patch16_224"


class StartingPoint(NamedTuple):
    """The options that flags override."""

    model: str
    options: dict[str, Any]
    switches: dict[str, Any]


def starting_point(recipe: str | Mapping[str, Any] | None, model: str | None) -> StartingPoint:
    """The options of a recipe, or of its table, None being the defaults, and of a model, None being the recipe's."""
    table = read_recipe(recipe) if isinstance(recipe, str) else dict(recipe or {})
    switches = dict(table.get("model", {}))
    own = switches.pop("name", None)
    name = model or own or DEFAULT_MODEL
    if name != own:
        # The switches of a recipe belong to its model; another model has its own.
        switches = {key: value for key, value in switches.items() if key == "drop_path"}
    return StartingPoint(name, recipe_options(table, str(recipe)), switches)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run; those that decide its result are in `Job.identity`, such as the seed and the guard's policy."""

    output: str = "runs"
    """Folder of all runs."""
    experiment: str | None = None
    """Name of this run's folder; default: from the model, the data and the settings."""
    seed: int = ranged(42, least=0, most=2**32 - 1)
    """Random seed of weights, order and augmentation."""
    device: str = "auto"
    """auto, cpu or cuda."""
    workers: int = ranged(0, least=0, most=1024)
    """Number of workers that decode images; 0: one per core."""
    worker_kind: Literal["auto", "threads", "processes"] = "auto"
    """Kind of the workers; auto: processes when training on a GPU, where threads would slow the loop, else threads."""
    max_bad: float = ranged(0.01, least=0, most=1)
    """Share of the images that may be unreadable; they are replaced, and more end the run."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume where the same command left off; never: refuse to touch an old run."""
    allow_change: tuple[str, ...] | None = None
    """Settings, such as lr or epochs, and "data", that may differ from the run being resumed; others may not."""
    initial_checkpoint: str | None = None
    """Weights to start from; position embeddings are resized to this run's image size."""
    initial_head: Literal["load", "new"] = "load"
    """Load the classifier from those weights too, or start a new one for other classes."""
    recovery_interval: int = ranged(0, least=0)
    """Also save every N updates; 0: after evaluations only."""
    checkpoint_hist: int = ranged(2, least=1)
    """Number of newest checkpoints to keep, besides the best."""
    eval_interval: int = ranged(1, least=1)
    """Evaluate and save every N epochs, and after the last."""
    probe_interval: int | None = ranged(None, least=0)
    """Measure every block each N updates (probe.jsonl); 0: never. Default: as often as it takes 2 % of the time."""
    guard: Literal["stop", "skip", "rollback"] = "stop"
    """Action after an update whose loss or gradient is not finite, which never reaches the weights: stop the run
    (exit 3), skip its batches, or roll back to the last checkpoint, halve the learning rate and skip those batches."""
    guard_limit: int = ranged(5, least=1)
    """Largest number of updates skipped in a row, and of rollbacks in a run, before it stops."""
    spike_score: float = ranged(10.0, least=0)
    """A loss this many robust deviations above the median of the last 100 is a spike."""
    on_spike: Literal["log", "rollback"] = "log"
    """Log a spike in guard.jsonl, or also roll back as --guard rollback does."""
    fsdp: bool = False
    """Shard weights, moments and EMA over the ranks of torchrun (FSDP2)."""
    log: str | None = None
    """Trackers that get the metrics, separated by commas: tensorboard, wandb, mlflow, trackio."""
    swap_norms: str | None = None
    """Replace every norm of the model before training: a norm, or with its start, as learnable_scaler:normal."""

    def __post_init__(self) -> None:
        check_device(self.device)
        check_ranges(self, "--")
        if self.allow_change and self.experiment is None:
            raise ConfigError("--allow-change: name the run to resume with --experiment")
        if self.initial_head == "new" and self.initial_checkpoint is None:
            raise ConfigError("--initial-head would not be used: it needs --initial-checkpoint; add that")
        if self.experiment is not None and not re.fullmatch(r"(?!\.+$)[\w.@=+-]{1,200}", self.experiment):
            raise ConfigError(f"--experiment {self.experiment!r}: use letters, digits and . _ - = + @ only")


SPEED = ("amp", "precision", "torchcompile")
"""Options of a recipe whose result on this device is recorded beside the identity, and compared with the record."""

OF_RESULT = (
    *("seed", "swap_norms", "initial_checkpoint", "initial_head"),
    *("guard", "guard_limit", "on_spike", "spike_score"),
)
"""Run options that decide the result."""


TABLES = ("model", "recipe", "run")
FOUND = ("classes", "roles", "speed", "preprocessing")
"""What a run adds to its config.toml."""


def _fields(cls: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a dataclass in a table read from TOML, each checked against its type."""
    for key, value in table.items():
        check_name(key, [each.name for each in fields(cls)], "option", where)
        check_field(cls, key, value, where, ConfigError)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


class GivenModule(NamedTuple):
    """Facts of a model that Python code gives: the side of its images, and a hash of its state before training."""

    image_size: int
    state: str


@dataclass(frozen=True)
class Job:
    """One training run.

    Args:
        data: Path of the data; None is the embedded handwritten digits.
        model: A fathoms name, or "timm/NAME".
        config: The model's config; None for timm models.
        recipe: The training settings; mean, std and interpolation that it leaves open are the model's own.
        run: The run options.
        module: A module that Python code gave, whose class is `model`; None where a name is built.
    """

    data: str | None
    model: str
    config: ViTConfig | None
    recipe: Recipe
    run: RunOptions = field(default_factory=RunOptions)
    module: GivenModule | None = None

    def __post_init__(self) -> None:
        own = {**IMAGENET, "interpolation": "bicubic", **data_config(self.model)}
        open_ = {n: own[n] for n in ("mean", "std", "interpolation") if getattr(self.recipe, n) is None}
        object.__setattr__(self, "recipe", self.recipe.replace(**open_))
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
        """Every setting that decides the result, and so must not change when a run resumes."""
        return copy.deepcopy(self._identity)

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        run = {name: getattr(self.run, name) for name in OF_RESULT}
        config = None if self.config is None else self.config.to_dict()
        return {
            "data": self.data or "digits",
            "model": self.model,
            **run,
            "config": config,
            "recipe": self.recipe.to_dict(),
            **({} if self.module is None else {"module": list(self.module)}),
        }

    def table(self) -> dict[str, Any]:
        """All settings, as in config.toml; how many classes there are is a fact of the data."""
        table = self.identity()
        config = table.pop("config") or {}
        config.pop("num_classes", None)
        return {**table, "model": {"name": self.model, **config}, "run": vars(self.run)}

    @classmethod
    def from_table(
        cls,
        table: Mapping[str, Any],
        where: str,
        recipe: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        switches: Mapping[str, Any] | None = None,
    ) -> Job:
        """The job that `table` wrote down as config.toml, with fields of recipe, run options and model overridden.

        What a run has found out and adds to its file, such as the classes, is left out.
        """
        for key in table:
            check_name(key, (*TABLES, "data", *OF_RESULT, *FOUND), "key", where)
        for key in ("recipe", "run", "model"):
            if not isinstance(table.get(key, {}), dict):
                raise ConfigError(f"{where}: {key} must be a table; write [{key}] and its fields below")
        options = _fields(RunOptions, table.get("run", {}), f"{where}: [run]")
        for key in OF_RESULT:
            if key in table and options.setdefault(key, table[key]) != table[key]:
                raise ConfigError(
                    f"{where}: {key} is {table[key]!r} at the top and {options[key]!r} under [run]"
                )
        data, model = table.get("data", "digits"), dict(table.get("model", {}))
        name = model.pop("name", None)
        if not isinstance(name, str) or not isinstance(data, str):
            raise ConfigError(
                f"{where}: data and the name under [model] must be strings; write them in quotes"
            )
        if name.startswith("timm/"):
            if model or switches:
                raise ConfigError(
                    f"{where}: {next(iter({**model, **(switches or {})}))}: timm models have no switches"
                )
            config = None
        else:
            # How many classes there are is a fact of the data, which the file does not hold.
            own: dict[str, Any] = {"num_classes": model_config(name).num_classes}
            own |= _fields(ViTConfig, model, f"{where}: [model]")
            config = ViTConfig(**{**own, **(switches or {})})
        settings = Recipe.join(recipe_options(table.get("recipe", {}), where), dict(recipe or {}))
        chosen = RunOptions(**{**options, **(run or {})})
        return cls(None if data == "digits" else data, name, config, settings, chosen)

    @property
    def folder(self) -> Path:
        if self.run.experiment is not None:
            return Path(self.run.output) / self.run.experiment
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        stem = Path(self.data).name if self.data else "digits"
        name = re.sub(r"[^\w.-]+", "_", f"{self.model}-{stem}")
        return Path(self.run.output) / f"{name}-{digest[:8]}"


def _start_record(run: RunOptions) -> TrainingRecord:
    """The record of the weights that a run starts from; empty where they have none on this machine."""
    start = run.initial_checkpoint
    return record_beside(Path(start)) if start is not None and Path(start).exists() else TrainingRecord()


def start_preprocessing(run: RunOptions) -> dict[str, Any]:
    """What is recorded of the evaluation pixels of the weights that a run starts from."""
    return _start_record(run).preprocessing


def job_of(
    data: str | None,
    model: str | ViTConfig | None,
    recipe: str | Mapping[str, Any] | None,
    options: Mapping[str, Any],
    switches: Mapping[str, Any],
    run: RunOptions,
    module: GivenModule | None = None,
) -> Job:
    """The job of a recipe with settings of the recipe and of the model that override it."""
    if recipe == "finetune" and run.initial_checkpoint is None and module is None:
        raise ConfigError("--recipe finetune: starts from trained weights; add --initial-checkpoint")
    name, config = (DEFAULT_MODEL, model) if isinstance(model, ViTConfig) else (model, None)
    record = _start_record(run)
    recorded = record.vit if model is None and module is None and record.name in (*MODELS, *ALIASES) else None
    name, base, own = starting_point(recipe or ("digits" if data is None else None), name)
    # Pixels as the weights of the start saw them, unless the recipe or a flag says otherwise.
    seen = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in record.preprocessing.items()
        if key in ("mean", "std", "interpolation")
    }
    joined = Recipe.join({**seen, **base}, dict(options))
    if recorded is not None:
        run = replace(run, swap_norms=run.swap_norms or record.swap_norms)
        return Job(data, str(record.name), recorded.replace(**switches), joined, run)
    if config is not None:
        return Job(data, name, config.replace(**switches), joined, run)
    if module is None:
        refuse_weights(name, "--model")
    if module is None and not name.startswith(TIMM):
        return Job(data, name, model_config(name, **overridden(own, switches)), joined, run)
    if switches:
        first, kind = (
            flag_of(next(iter(switches))),
            "timm models have" if module is None else "a module has",
        )
        raise ConfigError(f"{first}: {kind} no such switch; leave it out")
    return Job(data, name, None, joined, run, module)


def flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A nested table with one key for each value, such as "recipe.lr"."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two identities, one "name: old -> new" each, without what `SPEED` names."""
    old, new = flat(before), flat(now)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if key.rpartition(".")[2] not in SPEED and json.dumps(old.get(key)) != json.dumps(new.get(key))
    ]
