"""Recipe: how to train, flag by flag under timm's names. Importing this file does not import torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from fathoms.config_checks import check_choices, check_types
from fathoms.errors import ConfigError
from fathoms.registry import check_name
from fathoms.train.recipe.unused import refuse_unused, without_idle


@dataclass(frozen=True)
class Recipe:
    """Everything that decides how a model is trained, but the model and the data.

    >>> Recipe(opt="lamb", lr=0.005).opt
    'lamb'
    """

    epochs: int = 100
    """Times the data set is seen, warm-up included."""
    batch_size: int = 128
    """Images per step on each process."""
    grad_accum_steps: int = 1
    """Steps whose gradients are summed before an update."""
    opt: Literal["adamw", "lamb", "muon", "sgd", "momentum"] = "adamw"
    """The optimizer."""
    lr: float = 1e-3
    """Base learning rate, for the batch as it is; nothing is rescaled behind your back."""
    weight_decay: float = 0.05
    """Weight decay of the matrices."""
    opt_eps: float | None = None
    """The optimizer's epsilon; None: its own."""
    opt_betas: tuple[float, float] | None = None
    """The optimizer's betas; None: its own."""
    momentum: float | None = None
    """Momentum of sgd, momentum and muon; None: the optimizer's own."""
    layer_decay: float | None = None
    """Share of the learning rate that each layer keeps of the one above it."""
    clip_grad: float | None = None
    """Largest norm of the whole gradient."""
    sched: Literal["cosine", "step", "wsd", "custom", "constant"] = "cosine"
    """The learning rate's schedule."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up."""
    warmup_lr: float = 1e-5
    """Where the warm-up starts."""
    warmup_prefix: bool = False
    """Whether the warm-up comes before the schedule instead of over its first epochs."""
    min_lr: float = 0.0
    """Where the schedule ends."""
    cooldown_epochs: float = 0.0
    """Epochs at the minimum after the schedule."""
    decay_epochs: float | None = None
    """Epochs between steps (step), or of the decay at the end (wsd)."""
    decay_rate: float | None = None
    """Factor of each step."""
    epoch_factor: float | None = None
    """Lowering of LearnableScaler's custom schedule."""
    epoch_threshold: float | None = None
    """Share of the epochs after which the custom schedule leaves the lowered cosine."""
    sched_on_updates: bool = False
    """Move the learning rate with every update instead of every epoch."""
    smoothing: float = 0.1
    """Label smoothing."""
    bce_loss: bool = False
    """Binary cross-entropy on each class instead of cross-entropy over them."""
    bce_sum: bool = False
    """Sum it over the classes instead of taking the mean."""
    bce_target_thresh: float | None = None
    """Targets above this count as one, others as zero."""
    mixup: float = 0.0
    """Alpha of mixup."""
    cutmix: float = 0.0
    """Alpha of cutmix."""
    mixup_prob: float = 1.0
    """Probability of mixing a batch."""
    mixup_switch_prob: float = 0.5
    """Probability of cutmix where both are on."""
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    """One mixture for a batch, a pair or a sample."""
    aa: str | None = None
    """Augmentation policy: rand-m9-mstd0.5-inc1 and the like, AutoAugment's v0 or original, or 3a."""
    color_jitter: float | None = None
    """Strength of brightness, contrast and saturation."""
    reprob: float = 0.0
    """Probability of random erasing."""
    remode: Literal["pixel", "const", "rand"] = "pixel"
    """What erased rectangles are filled with."""
    recount: int = 1
    """Largest number of erased rectangles."""
    aug_repeats: int = 1
    """Repeated augmentation: times a sample is drawn in an epoch of the same length."""
    crop: Literal["resized", "pad", "whole"] = "resized"
    """RandomResizedCrop, a shift by a few pixels, or the whole picture."""
    crop_padding: int = 4
    """Pixels that a shifted picture may move."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the area that a resized crop covers."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Width over height of a resized crop."""
    progressive_size: str | None = None
    """Train on smaller images first: EPOCH:SIZE from which epoch on which size, such as 0:128,100:160,200:224."""
    hflip: float = 0.5
    """Probability of a mirror image."""
    train_interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    """Filter of training crops."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    """Filter of evaluation."""
    crop_pct: float | None = None
    """Share of the picture that evaluation keeps; None: 0.9 of a photo, all of an array."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Subtracted from the colours."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """What the colours are divided by."""
    train_feature_decay: float = 0.0
    """LearnableScaler's penalty on features above 200; its weight is the square of this."""
    attn_extra_loss: float = 0.0
    """LearnableScaler's penalty on attention rows without a peak."""
    attn_extra_loss_layers: int = 0
    """The first blocks that the attention penalty looks at."""
    teacher: str | None = None
    """Distil from this model: NAME, timm/NAME, or NAME=WEIGHTS.safetensors."""
    distillation_type: Literal["none", "hard", "soft"] = "none"
    """Learn the teacher's decision (hard) or its probabilities (soft)."""
    distillation_alpha: float = 0.5
    """Share of the loss that the teacher decides."""
    distillation_tau: float = 1.0
    """Temperature of soft distillation."""
    model_ema: bool = False
    """Keep an exponential moving average of the weights, and evaluate it."""
    model_ema_decay: float = 0.9998
    """Its decay."""
    model_ema_warmup: bool = False
    """Let the decay rise from zero."""
    amp: bool = False
    """Mixed precision."""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """The low precision of --amp."""
    precision: Literal["fp32", "autocast_fp32_stream", "autocast", "bf16"] | None = None
    """What steps are computed in; bf16 casts the weights once a step. None: autocast with --amp, else fp32."""
    torchcompile: str | None = None
    """Compile with this backend of torch, such as inductor."""
    compile_scope: Literal["model", "blocks"] | None = None
    """Compile the model as one, or each block, which is quicker to compile. None: the model."""
    launch: Literal["eager", "graph"] | None = None
    """Launch kernels one by one, or each step as one CUDA graph. None: one by one."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    freeze: str | None = None
    """Parameters that stay as they are: shell patterns, separated by commas."""

    def __post_init__(self) -> None:
        _check(self)

    def replace(self, **changes: Any) -> Recipe:
        """A copy with other values; an unknown field is an error that names the nearest one."""
        for name in changes:
            check_name(name, RECIPE_FIELDS, "option", "recipe")
        return dataclasses.replace(self, **changes)

    @classmethod
    def join(cls, base: dict[str, Any], given: dict[str, Any]) -> Recipe:
        """A recipe file's options with the flags that override them; see `without_idle`."""
        for name in (*base, *given):
            check_name(name, RECIPE_FIELDS, "option", "recipe")
        return cls(**without_idle(DEFAULTS, base, given))

    def to_dict(self) -> dict[str, Any]:
        """Every field by name."""
        return {name: getattr(self, name) for name in RECIPE_FIELDS}

    @property
    def policy(self) -> str:
        """The precision policy, `--amp` taken into account."""
        return self.precision or ("autocast" if self.amp else "fp32")


DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Recipe)}
RECIPE_FIELDS = tuple(DEFAULTS)


# The most of each count: far above any run, and small enough that a stranger's file cannot fill the memory
# or keep the machine busy without end.
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
    """Refuse what cannot be or would not be used, before any data is read."""
    check_types(recipe, "train", ConfigError)
    check_choices(recipe, "train")
    refuse_unused(recipe, [name for name, value in DEFAULTS.items() if getattr(recipe, name) != value])
    for name in ("epochs", "batch_size", "grad_accum_steps", "aug_repeats", "recount"):
        if getattr(recipe, name) < 1:
            raise ConfigError(f"train.{name}={getattr(recipe, name)} is too small; use 1 or more")
    for name, most in _MOST.items():
        if getattr(recipe, name) > most:
            raise ConfigError(f"train.{name}={getattr(recipe, name)} is too large; use {most} or less")
    if recipe.lr <= 0:
        raise ConfigError(f"train.lr={recipe.lr} is no learning rate; give one above zero")
    if recipe.attn_extra_loss and recipe.attn_extra_loss_layers < 1:
        raise ConfigError("train.attn_extra_loss looks at no block; give --attn-extra-loss-layers")
    if (recipe.distillation_type == "none") != (recipe.teacher is None):
        raise ConfigError("train.teacher and train.distillation_type belong together; give both or neither")
    if recipe.precision == "bf16" and recipe.amp_dtype != "bfloat16":
        raise ConfigError("train.precision='bf16' contradicts --amp-dtype float16; use precision 'autocast'")
    if recipe.launch == "graph" and recipe.progressive_size is not None:
        raise ConfigError("train.launch='graph' holds one image size; leave --progressive-size out")
    if recipe.launch == "graph" and recipe.amp_dtype != "bfloat16":
        raise ConfigError(
            "train.launch='graph' needs --amp-dtype bfloat16: float16 rescales the loss as it goes"
        )
    for name in ("clip_grad", "layer_decay"):
        if getattr(recipe, name) is not None and getattr(recipe, name) <= 0:
            raise ConfigError(
                f"train.{name}={getattr(recipe, name)} must be above zero; raise it or leave it out"
            )
