"""Recipe, the training options under timm's names; recipe files; refusal of options that would not be used.

Importing this file does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from fathoms.config_checks import (
    OFF_WORDS,
    check_choices,
    check_field,
    check_ranges,
    check_types,
    ranged,
    takes_off,
)
from fathoms.errors import ConfigError, flag_of
from fathoms.models.config import FIELDS
from fathoms.optimizer_facts import WITH_BETAS, WITH_MOMENTUM, OptimizerName
from fathoms.registry import check_name
from fathoms.text_table import one_of
from fathoms.untrusted import read_toml

ENDING = ("cosine", "wsd", "custom")
"""Schedules that reach the minimum learning rate at their end."""


@dataclass(frozen=True)
class Use:
    """Options that are read only under a condition, with the condition in words."""

    names: tuple[str, ...]
    read: Callable[[Any], bool]
    needs: str


USES = (
    Use(("momentum",), lambda r: r.opt in WITH_MOMENTUM, f"--opt {one_of(WITH_MOMENTUM)}"),
    Use(("opt_betas", "opt_eps"), lambda r: r.opt in WITH_BETAS, f"--opt {one_of(WITH_BETAS)}"),
    Use(("warmup_lr", "warmup_prefix"), lambda r: r.warmup_epochs > 0, "--warmup-epochs"),
    Use(("min_lr",), lambda r: r.sched != "constant", "a --sched that decays"),
    Use(("cooldown_epochs",), lambda r: r.sched in ENDING, f"--sched {one_of(ENDING)}"),
    Use(("decay_epochs",), lambda r: r.sched in ("step", "wsd"), "--sched step or wsd"),
    Use(("decay_rate",), lambda r: r.sched == "step", "--sched step"),
    Use(("epoch_factor", "epoch_threshold"), lambda r: r.sched == "custom", "--sched custom"),
    Use(
        ("sched_on_updates",),
        lambda r: r.sched != "constant" or r.warmup_epochs > 0,
        "a learning rate that changes: another --sched, or --warmup-epochs",
    ),
    Use(("bce_sum", "bce_target_thresh"), lambda r: r.bce_loss, "--bce-loss"),
    Use(("mixup_prob", "mixup_mode"), lambda r: bool(r.mixup or r.cutmix), "--mixup or --cutmix"),
    Use(("mixup_switch_prob",), lambda r: bool(r.mixup and r.cutmix), "both --mixup and --cutmix"),
    Use(("remode", "recount"), lambda r: r.reprob > 0, "--reprob"),
    Use(("crop_padding",), lambda r: r.crop == "pad", "--crop pad"),
    Use(("scale", "ratio"), lambda r: r.crop == "resized", "--crop resized"),
    Use(("attn_extra_loss_layers",), lambda r: r.attn_extra_loss > 0, "--attn-extra-loss"),
    Use(("distillation_alpha",), lambda r: r.distillation_type != "none", "--distillation-type"),
    Use(("distillation_tau",), lambda r: r.distillation_type == "soft", "--distillation-type soft"),
    Use(("model_ema_decay", "model_ema_warmup"), lambda r: r.model_ema, "--model-ema"),
    Use(
        ("amp_dtype",),
        lambda r: r.amp or r.precision not in ("auto", "fp32"),
        "--amp or --precision autocast",
    ),
    Use(("amp",), lambda r: r.precision == "auto", "--precision to be left out"),
)


def unused(options: Any) -> dict[str, str]:
    """Options that would not be read, each with what it needs."""
    return {name: use.needs for use in USES if not use.read(options) for name in use.names}


def refuse_unused(options: Any, given: Iterable[str]) -> None:
    """Raise for an option that would not be used."""
    idle = unused(options)
    for name in given:
        if name == "amp" and name in idle:
            flag = "--amp" if options.amp else "--no-amp"
            raise ConfigError(f"{flag} and --precision decide the same; leave one of them out")
        if name in idle:
            raise ConfigError(
                f"{flag_of(name)} would not be used: it needs {idle[name]}; add that or leave it out"
            )


def without_idle(defaults: dict[str, Any], base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The options of a recipe file, overridden by flags.

    An option of the file that the flags leave unused is dropped, such as the decay of the average under
    --no-model-ema, and so is a precision that --amp or --no-amp decides; a flag that would not be used is refused.
    """
    if given.get("amp") is not None:
        base = {name: value for name, value in base.items() if name != "precision"}
    options = SimpleNamespace(**{**defaults, **base, **given})
    refuse_unused(options, [name for name, value in given.items() if value is not None])
    idle = unused(options)
    return {name: value for name, value in {**base, **given}.items() if name not in idle}


@dataclass(frozen=True)
class Recipe:
    """All training options besides the model and the data; each field is a flag of `fathoms train`.

    >>> Recipe(opt="lamb", lr=0.005).opt
    'lamb'
    """

    epochs: int = ranged(100, least=1, most=10**6)
    """Number of epochs, warm-up included."""
    batch_size: int = ranged(128, least=1, most=10**6)
    """Images per batch on each rank."""
    grad_accum_steps: int = ranged(1, least=1, most=10**6)
    """Batches whose gradients are averaged in one update."""
    opt: OptimizerName = "adamw"
    """Optimizer."""
    lr: float = ranged(1e-3, above=0)
    """Base learning rate. It is never rescaled by the batch size."""
    weight_decay: float = 0.05
    """Weight decay of the matrices."""
    opt_eps: float | None = None
    """Epsilon of the optimizer. Default: the optimizer's own."""
    opt_betas: tuple[float, float] | None = None
    """Betas of the optimizer. Default: the optimizer's own."""
    momentum: float | None = None
    """Momentum of sgd, momentum and muon. Default: the optimizer's own."""
    layer_decay: float | None = ranged(None, above=0)
    """Layer-wise learning rate decay: factor from each layer to the one below it."""
    clip_grad: float | None = ranged(None, above=0)
    """Clip the norm of the whole gradient to this."""
    sched: Literal["cosine", "step", "wsd", "custom", "constant"] = "cosine"
    """Learning rate schedule."""
    warmup_epochs: float = ranged(0.0, least=0)
    """Epochs of linear warm-up."""
    warmup_lr: float = ranged(1e-5, least=0)
    """Learning rate at the start of the warm-up."""
    warmup_prefix: bool = False
    """Put the warm-up before the schedule instead of over its first epochs."""
    min_lr: float = ranged(0.0, least=0)
    """Learning rate at the end of the schedule."""
    cooldown_epochs: float = ranged(0.0, least=0)
    """Epochs at the minimum learning rate after the schedule."""
    decay_epochs: float | None = ranged(None, above=0)
    """Epochs between decays (step), or of the decay at the end (wsd)."""
    decay_rate: float | None = ranged(None, above=0)
    """Factor of each decay of the step schedule."""
    epoch_factor: float | None = ranged(None, above=0)
    """Factor on the first part of LearnableScaler's custom schedule."""
    epoch_threshold: float | None = ranged(None, least=0, most=1)
    """Share of the epochs after which the custom schedule leaves the lowered cosine for the plain one."""
    sched_on_updates: bool = False
    """Change the learning rate at every update instead of every epoch."""
    smoothing: float = ranged(0.1, least=0, below=1)
    """Label smoothing."""
    bce_loss: bool = False
    """Binary cross-entropy of each class instead of cross-entropy."""
    bce_sum: bool = False
    """Sum the binary cross-entropy over the classes instead of taking the mean."""
    bce_target_thresh: float | None = ranged(None, least=0, below=1)
    """Binary cross-entropy: targets above this count as one, others as zero."""
    mixup: float = 0.0
    """Alpha of mixup; 0: off."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0: off."""
    mixup_prob: float = 1.0
    """Probability of mixup or cutmix."""
    mixup_switch_prob: float = 0.5
    """Probability of cutmix when both mixup and cutmix are on."""
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    """Draw one mixture per batch, per pair of images or per image."""
    aa: str | None = None
    """Augmentation policy: RandAugment such as rand-m9-mstd0.5-inc1, AutoAugment v0 or original, or 3a."""
    color_jitter: float | None = None
    """Strength of random brightness, contrast and saturation; no effect beside --aa, other than a 3a."""
    reprob: float = 0.0
    """Probability of random erasing."""
    remode: Literal["pixel", "const", "rand"] = "pixel"
    """Fill of erased rectangles: noise per pixel, zero, or a random colour each."""
    recount: int = ranged(1, least=1, most=1000)
    """Largest number of erased rectangles."""
    aug_repeats: int = ranged(1, least=1, most=1000)
    """Repeated augmentation: number of times an image is drawn; the epoch keeps its length."""
    crop: Literal["resized", "pad", "whole"] = "resized"
    """RandomResizedCrop (resized), a random shift after padding (pad), or the whole image."""
    crop_padding: int = ranged(4, most=10**4)
    """Padding of --crop pad, in pixels."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the share of the image area that a resized crop covers."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Range of width over height of a resized crop."""
    val_share: float | None = ranged(None, least=0, below=1)
    """Share of the training set, of every class alike, on which choices are made; the held-out split is then the test
    set. 0: no choice is made, the last weights are the result. Default: the val split of the data; without one 0.05
    beside a test set, else 0.1."""
    progressive_size: str | None = None
    """Train on smaller images first: EPOCH:SIZE, the first epoch of each size, such as 0:128,100:160,200:224."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    train_interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    """Interpolation of training crops."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Interpolation of evaluation. Default: the model's own, else bicubic."""
    crop_pct: float | None = None
    """Share of the image that the center crop of evaluation keeps. Default: the model's own, else 0.9 for image files
    if the model's images are larger than 128 pixels, else 1."""
    mean: tuple[float, float, float] | None = None
    """Mean of each colour channel, for normalisation. Default: the model's own, else ImageNet's."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of each colour channel, for normalisation. Default: the model's own, else ImageNet's."""
    train_feature_decay: float = ranged(0.0, least=0)
    """LearnableScaler's penalty on features beyond 200; its weight is the square of this."""
    attn_extra_loss: float = ranged(0.0, least=0)
    """LearnableScaler's penalty on attention rows without a peak."""
    attn_extra_loss_layers: int = ranged(0, most=10**4)
    """Number of first blocks that the attention penalty applies to."""
    teacher: str | None = None
    """Teacher to distil from: timm/NAME, NAME=WEIGHTS.safetensors, a run folder, or hf-hub:OWNER/NAME."""
    distillation_type: Literal["none", "hard", "soft"] = "none"
    """Learn the teacher's top class (hard) or its probabilities (soft)."""
    distillation_alpha: float = ranged(0.5, least=0, most=1)
    """Weight of the teacher in the loss."""
    distillation_tau: float = ranged(1.0, above=0)
    """Temperature of soft distillation."""
    model_ema: bool = False
    """Keep an exponential moving average of the weights (EMA), and evaluate it."""
    model_ema_decay: float = ranged(0.9998, least=0, most=1)
    """Decay of the EMA."""
    model_ema_warmup: bool = False
    """Let the decay of the EMA rise from zero."""
    amp: bool | None = None
    """Mixed precision, in the form that suits the device; --no-amp: float32. Default: on a GPU that is good at it."""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Low-precision dtype of autocast."""
    precision: Literal["auto", "fp32", "autocast_fp32_stream", "autocast", "bf16"] = "auto"
    """Precision of training; bf16 casts the weights once per update. auto: bf16 where the GPU and the model allow it,
    else autocast or fp32."""
    torchcompile: str = "auto"
    """Compile with this torch.compile backend, such as inductor, or none, which also launches kernels one by one. auto:
    inductor on a GPU where the run is long enough for it to pay. On a GPU each batch is replayed as a CUDA graph where
    that is safe."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    freeze: str | None = None
    """Parameters to freeze: shell patterns of their names, separated by commas."""

    def __post_init__(self) -> None:
        _check(self)

    def replace(self, **changes: Any) -> Recipe:
        """A copy with other values; an unknown field is an error that offers the nearest one."""
        for name in changes:
            check_name(name, RECIPE_FIELDS, "option", "Recipe")
        return dataclasses.replace(self, **changes)

    @classmethod
    def join(cls, base: dict[str, Any], given: dict[str, Any]) -> Recipe:
        """The options of a recipe file, overridden by flags; see `without_idle`."""
        for name in (*base, *given):
            check_name(name, RECIPE_FIELDS, "option", "Recipe")
        return cls(**without_idle(DEFAULTS, base, given))

    @classmethod
    def can_be_off(cls) -> frozenset[str]:
        """Options that `none` switches off; for the others zero, one, a name or --no-... does."""
        hints = typing.get_type_hints(cls)
        return frozenset(name for name, hint in hints.items() if takes_off(hint))

    @property
    def total_epochs(self) -> int:
        """Epochs of the whole run, begun ones included.

        >>> Recipe(epochs=10, warmup_epochs=3, warmup_prefix=True, cooldown_epochs=2).total_epochs
        15
        """
        before = self.warmup_epochs if self.warmup_prefix else 0
        return math.ceil(self.epochs + before + self.cooldown_epochs)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in RECIPE_FIELDS}


DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Recipe)}
RECIPE_FIELDS = tuple(DEFAULTS)


def _check(recipe: Recipe) -> None:
    """Refuse values out of range and options that would not be used, before any data is read."""
    check_types(recipe, "--", ConfigError)
    check_choices(recipe, "--")
    refuse_unused(recipe, [name for name, value in DEFAULTS.items() if getattr(recipe, name) != value])
    check_ranges(recipe, "--")
    _check_combinations(recipe)


def _check_combinations(recipe: Recipe) -> None:
    if recipe.min_lr > recipe.lr:
        raise ConfigError(f"--min-lr {recipe.min_lr}: is above --lr {recipe.lr}; lower it")
    if recipe.attn_extra_loss and recipe.attn_extra_loss_layers < 1:
        raise ConfigError("--attn-extra-loss applies to no block; give --attn-extra-loss-layers")
    if (recipe.distillation_type == "none") != (recipe.teacher is None):
        raise ConfigError("--teacher and --distillation-type belong together; give both or neither")
    if recipe.precision == "bf16" and recipe.amp_dtype != "bfloat16":
        raise ConfigError("--precision bf16 contradicts --amp-dtype float16; use --precision autocast")


def recipe_names() -> list[str]:
    files = resources.files("fathoms.training").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The table of a recipe: one of `recipe_names()`, or the path of a TOML file.

    Its keys are fields of Recipe at the top, and fields of ViTConfig under [model].
    """
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise ConfigError(f"{name}: no such file; give a TOML file or a name from `fathoms recipes`")
        table = read_toml(name, ConfigError)
    else:
        check_name(name, recipe_names(), "recipe", "--recipe")
        file = resources.files("fathoms.training").joinpath("recipes", f"{name}.toml")
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    for key in table:
        check_name(key, (*RECIPE_FIELDS, "about", "model"), "option", name)
    if not isinstance(table.get("model", {}), dict):
        raise ConfigError(f"{name}: model must be a table; write [model] and its fields below")
    for key, value in (
        ("about", table.get("about", "")),
        ("[model] name", table.get("model", {}).get("name", "")),
    ):
        if not isinstance(value, str):
            raise ConfigError(f"{name}: {key} must be a string; write it in quotes")
    for key in table.get("model", {}):
        check_name(key, (*FIELDS, "name"), "option", f"{name}: [model]")
    options = recipe_options(table, name)
    refuse_unused(SimpleNamespace(**{**DEFAULTS, **options}), options)
    return table


def recipe_options(table: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of Recipe in a table read from TOML, each checked against its type."""
    options = {key: value for key, value in table.items() if key not in ("about", "model")}
    off = Recipe.can_be_off()
    for key, value in options.items():
        check_name(key, RECIPE_FIELDS, "option", where)
        if key in off and isinstance(value, str) and value in OFF_WORDS:
            options[key] = None
            continue
        check_field(Recipe, key, value, f"{where}: --", ConfigError)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
