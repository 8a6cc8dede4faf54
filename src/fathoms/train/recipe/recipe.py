"""Recipe, the training options under timm's names. Importing this file does not import torch."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any, Literal

from fathoms.errors import ConfigError, flag_of
from fathoms.names.config_checks import check_choices, check_types, takes_off
from fathoms.names.optimizers import OptimizerName
from fathoms.names.registry import check_name
from fathoms.train.recipe.unused import refuse_unused, without_idle


@dataclass(frozen=True)
class Recipe:
    """All training options besides the model and the data; each field is a flag of `fathoms train`.

    >>> Recipe(opt="lamb", lr=0.005).opt
    'lamb'
    """

    epochs: int = 100
    """Number of epochs, warm-up included."""
    batch_size: int = 128
    """Images per batch on each rank."""
    grad_accum_steps: int = 1
    """Batches whose gradients are averaged in one update."""
    opt: OptimizerName = "adamw"
    """Optimizer."""
    lr: float = 1e-3
    """Base learning rate. It is never rescaled by the batch size."""
    weight_decay: float = 0.05
    """Weight decay of the matrices."""
    opt_eps: float | None = None
    """Epsilon of the optimizer. Default: the optimizer's own."""
    opt_betas: tuple[float, float] | None = None
    """Betas of the optimizer. Default: the optimizer's own."""
    momentum: float | None = None
    """Momentum of sgd, momentum and muon. Default: the optimizer's own."""
    layer_decay: float | None = None
    """Layer-wise learning rate decay: factor from each layer to the one below it."""
    clip_grad: float | None = None
    """Clip the norm of the whole gradient to this."""
    sched: Literal["cosine", "step", "wsd", "custom", "constant"] = "cosine"
    """Learning rate schedule."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up."""
    warmup_lr: float = 1e-5
    """Learning rate at the start of the warm-up."""
    warmup_prefix: bool = False
    """Put the warm-up before the schedule instead of over its first epochs."""
    min_lr: float = 0.0
    """Learning rate at the end of the schedule."""
    cooldown_epochs: float = 0.0
    """Epochs at the minimum learning rate after the schedule."""
    decay_epochs: float | None = None
    """Epochs between decays (step), or of the decay at the end (wsd)."""
    decay_rate: float | None = None
    """Factor of each decay of the step schedule."""
    epoch_factor: float | None = None
    """Factor on the first part of LearnableScaler's custom schedule."""
    epoch_threshold: float | None = None
    """Share of the epochs after which the custom schedule leaves the lowered cosine for the plain one."""
    sched_on_updates: bool = False
    """Change the learning rate at every update instead of every epoch."""
    smoothing: float = 0.1
    """Label smoothing."""
    bce_loss: bool = False
    """Binary cross-entropy of each class instead of cross-entropy."""
    bce_sum: bool = False
    """Sum the binary cross-entropy over the classes instead of taking the mean."""
    bce_target_thresh: float | None = None
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
    """Strength of random brightness, contrast and saturation."""
    reprob: float = 0.0
    """Probability of random erasing."""
    remode: Literal["pixel", "const", "rand"] = "pixel"
    """Fill of erased rectangles: noise per pixel, zero, or one random colour."""
    recount: int = 1
    """Largest number of erased rectangles."""
    aug_repeats: int = 1
    """Repeated augmentation: number of times an image is drawn; the epoch keeps its length."""
    crop: Literal["resized", "pad", "whole"] = "resized"
    """RandomResizedCrop (resized), a random shift after padding (pad), or the whole image."""
    crop_padding: int = 4
    """Padding of --crop pad, in pixels."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the share of the image area that a resized crop covers."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Range of width over height of a resized crop."""
    val_share: float | None = None
    """Share of the training set, of every class alike, on which choices are made; the held-out split is then the test
    set. 0: no choice is made, the last weights are the result. Default: the val split of the data; without one 0.05
    beside a test set, else 0.1."""
    progressive_size: str | None = None
    """Train on smaller images first: EPOCH:SIZE, the first epoch of each size, such as 0:128,100:160,200:224."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    train_interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    """Interpolation of training crops."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    """Interpolation of evaluation."""
    crop_pct: float | None = None
    """Share of the image that the center crop of evaluation keeps. Default: 0.9 for image files if the
    model's images are larger than 128 pixels, else 1."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of each colour channel, for normalisation."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviation of each colour channel, for normalisation."""
    train_feature_decay: float = 0.0
    """LearnableScaler's penalty on features beyond 200; its weight is the square of this."""
    attn_extra_loss: float = 0.0
    """LearnableScaler's penalty on attention rows without a peak."""
    attn_extra_loss_layers: int = 0
    """Number of first blocks that the attention penalty applies to."""
    teacher: str | None = None
    """Teacher to distil from: timm/NAME, NAME=WEIGHTS.safetensors, a run folder, or hf-hub:OWNER/NAME."""
    distillation_type: Literal["none", "hard", "soft"] = "none"
    """Learn the teacher's top class (hard) or its probabilities (soft)."""
    distillation_alpha: float = 0.5
    """Weight of the teacher in the loss."""
    distillation_tau: float = 1.0
    """Temperature of soft distillation."""
    model_ema: bool = False
    """Keep an exponential moving average of the weights (EMA), and evaluate it."""
    model_ema_decay: float = 0.9998
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
    """Compile with this torch.compile backend, such as inductor, or none. auto: inductor on a GPU where the run is
    long enough for it to pay."""
    compile_scope: Literal["auto", "model", "blocks"] = "auto"
    """Compile the whole model, or each block, which compiles faster. auto: the blocks, if nothing looks into them."""
    launch: Literal["auto", "eager", "graph"] = "auto"
    """Launch kernels one by one (eager), or replay each batch as one CUDA graph. auto: a graph where that is safe."""
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
        spans = (self.epochs, self.warmup_epochs, self.warmup_prefix, self.cooldown_epochs)
        return math.ceil(epochs_of_run(*spans))

    def to_dict(self) -> dict[str, Any]:
        """Every field by name."""
        return {name: getattr(self, name) for name in RECIPE_FIELDS}


def epochs_of_run(epochs: float, warmup_epochs: float, warmup_prefix: bool, cooldown_epochs: float) -> float:
    """Epochs of a schedule's shape, of a warm-up before it, and of the cool-down."""
    return epochs + (warmup_epochs if warmup_prefix else 0) + cooldown_epochs


DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Recipe)}
RECIPE_FIELDS = tuple(DEFAULTS)


# The largest value of each count: far above any run, and small enough that an untrusted file cannot fill the memory
# or keep the machine busy for ever.
_MOST = {
    "epochs": 1_000_000,
    "batch_size": 1_000_000,
    "grad_accum_steps": 1_000_000,
    "aug_repeats": 1_000,
    "recount": 1_000,
    "crop_padding": 10_000,
    "attn_extra_loss_layers": 10_000,
}


def _check(recipe: Recipe) -> None:
    """Refuse values out of range and options that would not be used, before any data is read."""
    check_types(recipe, "--", ConfigError)
    check_choices(recipe, "--")
    refuse_unused(recipe, [name for name, value in DEFAULTS.items() if getattr(recipe, name) != value])
    _check_ranges(recipe)
    _check_combinations(recipe)


def _check_ranges(recipe: Recipe) -> None:
    for name in ("epochs", "batch_size", "grad_accum_steps", "aug_repeats", "recount"):
        if getattr(recipe, name) < 1:
            raise ConfigError(f"{flag_of(name)} {getattr(recipe, name)}: is too small; use 1 or more")
    for name, most in _MOST.items():
        if getattr(recipe, name) > most:
            raise ConfigError(f"{flag_of(name)} {getattr(recipe, name)}: is too large; use {most} or less")
    if recipe.val_share is not None and not 0 <= recipe.val_share < 1:
        raise ConfigError(f"--val-share {recipe.val_share}: use a share from 0 to below 1")
    for name in ("clip_grad", "layer_decay"):
        if getattr(recipe, name) is not None and getattr(recipe, name) <= 0:
            raise ConfigError(
                f"{flag_of(name)} {getattr(recipe, name)}: must be above zero; raise it or leave it out"
            )


def _check_combinations(recipe: Recipe) -> None:
    if recipe.attn_extra_loss and recipe.attn_extra_loss_layers < 1:
        raise ConfigError("--attn-extra-loss applies to no block; give --attn-extra-loss-layers")
    if (recipe.distillation_type == "none") != (recipe.teacher is None):
        raise ConfigError("--teacher and --distillation-type belong together; give both or neither")
    if recipe.precision == "bf16" and recipe.amp_dtype != "bfloat16":
        raise ConfigError("--precision bf16 contradicts --amp-dtype float16; use --precision autocast")
    if recipe.launch == "graph" and recipe.progressive_size is not None:
        raise ConfigError("--launch graph is for one image size; leave --progressive-size out")
    if recipe.launch == "graph" and recipe.amp_dtype != "bfloat16":
        raise ConfigError(
            "--launch graph needs --amp-dtype bfloat16: float16 changes the loss scale during training"
        )
