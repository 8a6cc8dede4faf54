"""Combinations of a ViTConfig's options that are refused: contradictions, and options that nothing would read.

`config` is a ViTConfig, whose file uses this one and not the other way round.
"""

from __future__ import annotations

from typing import Any

from fathoms.errors import ConfigError
from fathoms.parts.attention import ATTENTIONS
from fathoms.parts.block import check_residual
from fathoms.parts.norms import NORMS
from fathoms.parts.position import POSITIONS
from fathoms.parts.readout import READOUTS
from fathoms.parts.residuals import RESIDUALS
from fathoms.parts.stem import conv_stride

# A base this many times as deep is not one that a learning rate was tuned at: branches would grow as many times.
MOST_SHALLOW = 16


def check_combination(config: Any) -> None:
    """Refuse options that contradict each other, and options that would silently have no effect."""
    for norm, placements in {*zip(config.norms(), config.placements(), strict=True)}:
        check_residual(config.residual, norm, *placements)
    for name, example in (("norm_by_depth", "0-2:dyt"), ("placement_by_depth", "0-2:post")):
        if getattr(config, name) == "":
            raise ConfigError(f"{name} is empty; write for example {example!r}, or leave it out")
    _check_inits(config)
    _check_transfer(config)
    _check_residual_options(config)
    _check_stem(config)
    _check_attention(config)
    _check_readout(config)


def _check_inits(config: Any) -> None:
    """Inits under the names that the config has for them, which are not those of the parts."""
    if config.residual_init is not None and not RESIDUALS.takes(config.residual, "init_value"):
        raise ConfigError(f"residual {config.residual!r} takes no residual_init; leave it out")
    for norm in config.norms() if config.norm_init is not None else ():
        if not NORMS.takes(norm, "init"):
            raise ConfigError(f"norm {norm!r} takes no norm_init; leave it out")


def _check_transfer(config: Any) -> None:
    """The base of methods that transfer a learning rate over depth and width."""
    given = {name: getattr(config, name) for name in ("base_depth", "base_dim")}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(
                f"{name}={value} is too small; give the {name[5:]} that the learning rate was tuned at"
            )
        if value is not None and RESIDUALS.metadata(config.residual).alpha is None:
            raise ConfigError(
                f"residual {config.residual!r} takes no {name}; leave it out, or use 'completep'"
            )
    if config.base_depth is not None and config.base_depth > MOST_SHALLOW * config.depth:
        raise ConfigError(
            f"base_depth={config.base_depth} is more than {MOST_SHALLOW} times depth={config.depth}, and branches "
            "would be multiplied by as much; give the depth that the learning rate was tuned at"
        )
    width = config.dim // config.heads
    if config.base_dim is not None and config.base_dim % width:
        raise ConfigError(
            f"base_dim={config.base_dim}: heads keep their width, {width} at dim={config.dim} and "
            f"heads={config.heads}; give a multiple of {width}"
        )
    if config.base_dim is not None and config.attention == "talking_heads":
        raise ConfigError(
            "base_dim: there is no rule for the matrices that mix talking heads; use attention 'softmax'"
        )


def _check_residual_options(config: Any) -> None:
    method = RESIDUALS.metadata(config.residual)
    if config.residual_warmup is not None and "warmup" not in method.takes:
        raise ConfigError(
            f"residual {config.residual!r} takes no residual_warmup; leave it out, or use 'prores'"
        )
    if config.residual_warmup is not None and not 0 < config.residual_warmup <= 1:
        raise ConfigError(
            f"residual_warmup={config.residual_warmup} is not a share of the run; use for example 0.2"
        )
    if method.reads_patches and config.readout == "class_attention":
        raise ConfigError(
            f"residual {config.residual!r} reads the mean of the patches, and class attention writes no patch; "
            "use another readout"
        )


def _check_stem(config: Any) -> None:
    for name in ("stem_layers", "stem_kernel"):
        if config.stem != "conv" and getattr(config, name) != getattr(type(config), name):
            raise ConfigError(f"stem {config.stem!r} takes no {name}; leave it out, or use 'conv'")
    if config.stem == "conv" and config.stem_init != type(config).stem_init:
        raise ConfigError(
            "stem 'conv' takes no stem_init, it starts from He's normal; leave it out, or use 'patch'"
        )
    if config.stem == "conv":
        conv_stride(config.patch_size, config.stem_layers)
        if config.stem_kernel % 2 == 0:
            raise ConfigError(f"stem_kernel={config.stem_kernel} is even and has no middle; use 3 or 7")
    if config.stem == "conv" and config.stem_norm in ("pre", "dual"):
        raise ConfigError(
            f"stem_norm {config.stem_norm!r} norms the pixels of a patch, which stem 'conv' has not; use 'post'"
        )
    if config.stem_norm == "post_pos" and not POSITIONS.metadata(config.position).adds:
        raise ConfigError(
            f"stem_norm 'post_pos' needs positions that are added, not {config.position!r}; use 'post'"
        )


def _check_attention(config: Any) -> None:
    if ATTENTIONS.metadata(config.attention).reads_context:
        raise ConfigError(
            f"attention={config.attention!r} reads a context besides the stream and works in a read-out only; "
            f"use readout={config.attention!r}"
        )
    if config.attn_gate != "none" and config.readout == "class_attention":
        raise ConfigError(
            f"attn_gate {config.attn_gate!r} is defined on self-attention, not on the class attention of the "
            "read-out; use another readout, or leave it out"
        )


def _check_readout(config: Any) -> None:
    if config.readout != "class_attention" and config.class_attention_depth != 2:
        raise ConfigError(f"readout {config.readout!r} takes no class_attention_depth; leave it out")
    if config.distill_token and not READOUTS.metadata(config.readout).queries:
        raise ConfigError(
            "distill_token needs a read-out with query tokens; use readout 'cls' or 'class_attention'"
        )
    if config.distill_early and not (config.distill_token and config.readout == "class_attention"):
        raise ConfigError(
            "distill_early needs a distillation token that could come late; use distill_token and readout "
            "'class_attention'"
        )
    if config.class_position and not config.may_place_queries:
        raise ConfigError(
            "class_position needs a class token in front of patches that learn their positions; use readout 'cls' "
            "and position 'learned' from the first block on"
        )
    if config.base_dim is not None and config.readout == "seqpool":
        raise ConfigError(
            "base_dim: there is no rule for the scores of readout 'seqpool'; use 'cls' or 'mean'"
        )
    if not config.class_token_block:
        return
    if not READOUTS.metadata(config.readout).travels:
        raise ConfigError(
            f"readout {config.readout!r} takes no class_token_block; leave it out, or use 'cls'"
        )
    if not 0 <= config.class_token_block < config.depth:
        raise ConfigError(
            f"class_token_block={config.class_token_block} leaves the blocks 0-{config.depth - 1} of this model; "
            "use one of them"
        )
