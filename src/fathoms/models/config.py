"""ViTConfig: the switches and sizes of a model, checked when built. Importing this file does not import torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, get_args

from fathoms.config_checks import check_field, check_types
from fathoms.errors import ConfigError
from fathoms.registry import check_name

Norm = Literal["layernorm", "rmsnorm", "scalenorm", "learnable_scaler", "dyt", "derf", "none"]
Placement = Literal["pre", "post", "pre_post", "res_post", "keel"]
Residual = Literal[
    "none",
    "layerscale",
    "rezero",
    "rezero_shared",
    "skipinit",
    "fixup",
    "tfixup",
    "deepnorm",
    "layernorm_scaling",
    "completep",
    "depth_mup",
    "orthogonal",
    "mv_split",
    "prores",
]
Stem = Literal["patch", "conv"]
StemNorm = Literal["none", "pre", "post", "dual", "post_pos"]
StemInit = Literal["fan_in", "trunc_normal"]
Attention = Literal["softmax", "talking_heads"]
AttnGate = Literal["none", "head", "channel"]
QKNorm = Literal["none", "rmsnorm", "layernorm"]
Position = Literal["learned", "sincos", "rope", "learned_rope", "none"]
Readout = Literal["cls", "mean", "mean_cls", "seqpool", "class_attention"]
MLP = Literal["gelu", "swiglu"]
Schedule = Literal["uniform", "linear"]


@dataclass(frozen=True)
class ViTConfig:
    """All options of one Vision Transformer; every field is also a flag of the command line.

    >>> ViTConfig(dim=192, heads=3, depth=36, norm="learnable_scaler").grid
    14
    """

    image_size: int = 224
    """Side of the square images, in pixels."""
    patch_size: int = 16
    """Side of a patch, in pixels; for stem conv, pixels between two tokens."""
    in_channels: int = 3
    """Channels of an image."""
    num_classes: int = 1000
    """Outputs of the classifier; 0 leaves it out."""
    dim: int = 384
    """Width of a token."""
    depth: int = 12
    """Number of blocks."""
    heads: int = 6
    """Attention heads; must divide dim."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLP, as a multiple of dim."""
    norm: Norm = "layernorm"
    """Norm of every residual branch."""
    norm_init: float | str | None = None
    """Init of the norm: "normal" or "ones" for learnable_scaler, alpha for dyt and derf. None: the norm's default."""
    final_norm: Norm | None = None
    """Norm after the last block. None: same as norm."""
    norm_by_depth: str | None = None
    """Norms by ranges of blocks, such as "0-11:layernorm,12-23:dyt". None: norm everywhere."""
    attn_placement: Placement = "pre"
    """Placement of the attention's norm."""
    mlp_placement: Placement = "pre"
    """Placement of the MLP's norm."""
    placement_by_depth: str | None = None
    """Placements of both by ranges of blocks, such as "0-2:post" (Mix-LN). None: the same everywhere."""
    residual: Residual = "none"
    """Residual method: how a branch is scaled, and its weights initialised."""
    residual_init: float | None = None
    """Init of that scale. None: the method's rule for this depth. 0 means 0."""
    base_depth: int | None = None
    """For completep and depth_mup: the depth that the learning rate was tuned at. None: 12."""
    base_dim: int | None = None
    """For completep and depth_mup: the width that it was tuned at, with heads of the same width. None: this width."""
    residual_warmup: float | None = None
    """For prores: share of the run by which the last block counts in full. None: 0.2."""
    stem: Stem = "patch"
    """From pixels to tokens: a projection of patches, or convolutions."""
    stem_layers: int = 1
    """Number of convolutions of the conv stem."""
    stem_kernel: int = 3
    """Side of its kernels."""
    stem_norm: StemNorm = "none"
    """LayerNorms around the patch projection."""
    stem_init: StemInit = "fan_in"
    """Init of the patch projection: that of torch's convolutions, as in timm and DeiT, or deviation 0.02."""
    attention: Attention = "softmax"
    """Attention of every block."""
    qk_norm: QKNorm = "none"
    """Norm of each head's q and k."""
    qkv_bias: bool = True
    """Whether the q, k, v projection has a bias; under residual fixup it has none."""
    attn_gate: AttnGate = "none"
    """Gate on the output of each head or of each channel, before the attention's last projection."""
    position: Position = "learned"
    """Position embedding of the patches."""
    registers: int = 0
    """Number of register tokens, which no output reads."""
    readout: Readout = "cls"
    """Read-out: how the classifier's input is pooled from the tokens."""
    class_token_block: int = 0
    """Index of the first block that the class token of readout cls goes through; 0: all of them."""
    class_position: bool | None = None
    """Whether the class token has a position besides. None: where patches learn one and it goes through all blocks."""
    class_attention_depth: int = 2
    """Number of blocks of the class-attention read-out."""
    distill_token: bool = False
    """Add a distillation token with a head of its own."""
    distill_early: bool = False
    """For readout class_attention: it goes through all blocks, as in DeiT; else it comes with the class token."""
    mlp: MLP = "gelu"
    """MLP of every block."""
    drop_path: float = 0.0
    """Probability of dropping a residual branch in training (stochastic depth)."""
    drop_path_schedule: Schedule = "linear"
    """Drop-path rate by depth: rising linearly from 0 as in ViT and DeiT, or uniform as in CaiT, DeiT-III and ViT-5."""

    def __post_init__(self) -> None:
        check_types(self, "", ConfigError)
        _check_sizes(self)
        _check_names(self)
        from fathoms.models.combinations import check_combination

        check_combination(self)

    @property
    def grid(self) -> int:
        """Number of patches along a side."""
        return self.image_size // self.patch_size

    @property
    def queries(self) -> int:
        """Number of query tokens, each with a head of its own."""
        return 2 if self.distill_token else 1

    @property
    def travelling(self) -> int:
        """Number of query tokens that go through blocks in front of the patches."""
        if self.readout == "class_attention":
            return int(self.distill_early)
        return self.queries if self.readout in ("cls", "mean_cls") else 0

    @property
    def may_place_queries(self) -> bool:
        """Whether a position of the query tokens has a meaning: patches learn one, and both enter the first block."""
        travels = self.readout in ("cls", "mean_cls") and not self.class_token_block
        return travels and self.position in ("learned", "learned_rope")

    @property
    def places_queries(self) -> bool:
        """Whether the query tokens have positions."""
        return self.may_place_queries if self.class_position is None else self.class_position

    def norms(self) -> list[str]:
        ranges = parse_ranges(self.norm_by_depth, self.depth)
        return [ranges.get(index, self.norm) for index in range(self.depth)]

    def placements(self) -> list[tuple[str, str]]:
        ranges = parse_ranges(self.placement_by_depth, self.depth, "placement_by_depth")
        own = (self.attn_placement, self.mlp_placement)
        return [(ranges[index],) * 2 if index in ranges else own for index in range(self.depth)]

    def replace(self, **changes: Any) -> ViTConfig:
        """A copy with other values; an unknown field is an error that names the nearest one.

        An init belongs to its method: another norm or residual takes its default unless one is given. So do the other
        options of some methods only.
        """
        for name in changes:
            check_name(name, FIELDS, "option", "ViTConfig")
        for method, options in BELONGING.items():
            if changes.get(method, getattr(self, method)) != getattr(self, method):
                changes = {option: DEFAULTS[option] for option in options} | changes
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


FIELDS = tuple(field.name for field in dataclasses.fields(ViTConfig))
DEFAULTS = {field.name: field.default for field in dataclasses.fields(ViTConfig)}
TOLD_BY_WEIGHTS = ("num_classes", "class_position", "norm_init", "residual_init", "stem_init")
"""Fields that weights tell by their shapes, or that start what is loaded over."""
OF_TRAINING = ("drop_path", "drop_path_schedule", "residual_warmup")
"""Fields that act in training only."""
# Options that belong to the value of another one.
BELONGING = {
    "norm": ("norm_init",),
    "residual": ("residual_init", "base_depth", "base_dim", "residual_warmup"),
    "stem": ("stem_layers", "stem_kernel", "stem_init"),
}


def overridden(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of a recipe under those that are given: another method does not take the options of the recipe's.

    >>> overridden({"residual": "layerscale", "residual_init": 0.1}, {"residual": "rezero"})
    {'residual': 'rezero'}
    """
    changed = [
        method for method in BELONGING if given.get(method, kept := own.get(method, DEFAULTS[method])) != kept
    ]
    idle = {option for method in changed for option in BELONGING[method]}
    return {**{name: value for name, value in own.items() if name not in idle}, **given}


# What the ranges of a field choose, and an example.
_RANGES = {
    "norm_by_depth": ("norms", "0-11:layernorm,12-23:dyt"),
    "placement_by_depth": ("placements", "0-2:post"),
}


def parse_ranges(text: str | None, depth: int, field: str = "norm_by_depth") -> dict[int, str]:
    """Block index to name, from a text such as "0-11:layernorm,12:dyt"."""
    chosen: dict[int, str] = {}
    kind, example = _RANGES[field]
    for item in text.split(",") if text else []:
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*:\s*(\S+)\s*", item, re.ASCII)
        if match is None:
            raise ConfigError(f"{field}: {item!r} is not a range with a name; write for example {example!r}")
        first, last, name = int(match[1]), int(match[2] or match[1]), match[3]
        if not first <= last < depth:
            raise ConfigError(
                f"{field}: {item!r} leaves the blocks 0-{depth - 1} of this model; write the first block, then the last"
            )
        if twice := chosen.keys() & set(range(first, last + 1)):
            raise ConfigError(f"{field}: block {min(twice)} has two {kind}; make the ranges disjoint")
        chosen |= dict.fromkeys(range(first, last + 1), name)
    return chosen


# Least and most of each size. The most is far above any model and far below what would keep a machine busy
# for hours with an untrusted config.
_SIZES = {
    "image_size": (1, 65_536),
    "patch_size": (1, 65_536),
    "in_channels": (1, 4_096),
    "num_classes": (0, 10_000_000),
    "dim": (1, 131_072),
    "depth": (1, 10_000),
    "heads": (1, 4_096),
    "registers": (0, 65_536),
    "class_attention_depth": (1, 1_000),
    "stem_layers": (1, 16),
    "stem_kernel": (1, 255),
}


def _check_sizes(config: ViTConfig | SimpleNamespace) -> None:
    for name, (least, most) in _SIZES.items():
        value = getattr(config, name)
        if value < least:
            raise ConfigError(f"{name}={value} is too small; use {least} or more")
        if value > most:
            raise ConfigError(f"{name}={value} is too large; use {most} or less")
    if config.dim % config.heads:
        raise ConfigError(f"dim={config.dim} is not divisible by heads={config.heads}")
    if config.image_size % config.patch_size:
        raise ConfigError(
            f"image_size={config.image_size} is not divisible by patch_size={config.patch_size}"
        )
    if not int(config.dim * config.mlp_ratio) >= 1:
        raise ConfigError(f"mlp_ratio={config.mlp_ratio} leaves the MLP no width; use for example 4.0")
    if config.mlp_ratio > 1000:
        raise ConfigError(f"mlp_ratio={config.mlp_ratio} is too large; use for example 4.0")
    if not 0.0 <= config.drop_path < 1.0:
        raise ConfigError(f"drop_path={config.drop_path} is not a probability below 1; use for example 0.1")


def check_early(values: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Check names, types and sizes of changes to a config's values before it is built, which imports torch."""
    for name, value in changes.items():
        check_name(name, FIELDS, "option", "ViTConfig")
        check_field(ViTConfig, name, value, "", ConfigError)
    known = {field.name: field.default for field in dataclasses.fields(ViTConfig)}
    _check_sizes(SimpleNamespace(**{**known, **values, **changes}))


def _check_names(config: ViTConfig) -> None:
    from fathoms.parts import families
    from fathoms.parts.stem import STEM_INITS

    for name, family in families().items():
        family.check(getattr(config, name), name)
    norms = families()["norm"]
    for name in {
        config.final_norm or config.norm,
        *parse_ranges(config.norm_by_depth, config.depth).values(),
    }:
        norms.check(name, "norm_by_depth" if config.norm_by_depth else "final_norm")
    for name in parse_ranges(config.placement_by_depth, config.depth, "placement_by_depth").values():
        families()["attn_placement"].check(name, "placement_by_depth")
    check_name(config.drop_path_schedule, get_args(Schedule), "schedule", "drop_path_schedule")
    check_name(config.stem_init, STEM_INITS, "start", "stem_init")
    check_name(config.qk_norm, ("none", "rmsnorm", "layernorm"), "qk_norm", "qk_norm")
