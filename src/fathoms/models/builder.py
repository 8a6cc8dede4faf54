"""The parts of a ViT, built from its config: the only file that turns settings into modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from fathoms.models.config import ViTConfig
from fathoms.parts.block import Block
from fathoms.parts.linears import STD
from fathoms.parts.norms import NORMS
from fathoms.parts.placements import drop_path_rates
from fathoms.parts.position import POSITIONS
from fathoms.parts.protocols import Part, Position, Readout, Stem
from fathoms.parts.readout import READOUTS
from fathoms.parts.residuals import RESIDUALS, ConstantScale
from fathoms.parts.stem import STEMS
from fathoms.parts.transfer import Transfer, transfer_of


def build_stem(config: ViTConfig) -> Stem:
    """The stem, which turns an image into tokens."""
    sizes = config.dim, config.patch_size, config.in_channels, config.stem_norm
    if config.stem == "conv":
        return STEMS.build("conv", *sizes, layers=config.stem_layers, kernel=config.stem_kernel)
    return STEMS.build(config.stem, *sizes, stem_init=config.stem_init)


def build_position(config: ViTConfig) -> Position:
    """The positions: a table that is added, or rotations of q and k."""
    if not POSITIONS.metadata(config.position).rotary:
        return POSITIONS.build(config.position, config.dim, config.grid)
    tokens = {"queries": config.travelling, "registers": config.registers}
    return POSITIONS.build(config.position, config.dim, config.grid, config.heads, **tokens)


def build_blocks(config: ViTConfig) -> nn.ModuleList:
    """The main stack: norm, placement and drop-path rate may differ by block."""
    rates = drop_path_rates(config.drop_path, config.depth, config.drop_path_schedule)
    by_depth = zip(config.norms(), config.placements(), rates, strict=True)
    return nn.ModuleList(
        Block(
            norm=norm,
            norm_init=config.norm_init if norm == config.norm else None,
            attn_placement=attn,
            mlp_placement=mlp,
            attention=config.attention,
            attn_gate=config.attn_gate,
            index=index,
            prefix=prefix_tokens(config, index),
            drop_path=rate,
            **_block_options(config),
        )
        for index, (norm, (attn, mlp), rate) in enumerate(by_depth)
    )


def _block_options(config: ViTConfig) -> dict[str, Any]:
    """Options that the blocks of both stages share."""
    names = ("dim", "heads", "depth", "mlp_ratio", "residual", "residual_init", "residual_warmup")
    names += ("qk_norm", "qkv_bias", "mlp", "base_depth", "base_dim")
    return {name: getattr(config, name) for name in names}


def prefix_tokens(config: ViTConfig, index: int) -> int:
    """Tokens in front of the patches in block `index`."""
    return config.registers + (config.travelling if index >= config.class_token_block else 0)


def build_readout(config: ViTConfig) -> Readout:
    """The read-out; class attention has blocks of its own, with the options of the main stack."""
    if config.readout != "class_attention":
        late = config.class_token_block or None
        placed = config.places_queries or None
        return READOUTS.build(config.readout, config.dim, queries=config.queries, joins=late, placed=placed)
    return READOUTS.build(
        config.readout,
        queries=config.queries,
        early=config.distill_early,
        class_attention_depth=config.class_attention_depth,
        norm=config.norm,
        norm_init=config.norm_init,
        attn_placement=config.attn_placement,
        mlp_placement=config.mlp_placement,
        **_block_options(config),
    )


def build_final_norm(config: ViTConfig) -> Part:
    """The norm before the head; it starts as those of the blocks do where it is one of them."""
    name = config.final_norm or config.norm
    return NORMS.build(name, config.dim, init=config.norm_init if name == config.norm else None)


def build_head(config: ViTConfig) -> nn.Module:
    """A classifier; the identity for 0 classes."""
    if not config.num_classes:
        return nn.Identity()
    head = nn.Linear(config.dim, config.num_classes)
    reset_head(head, config)
    return head


def build_head_scale(config: ViTConfig) -> ConstantScale | None:
    """The constant factor of what the classifiers read, where transfer over width has one."""
    factor = config_transfer(config).head
    return ConstantScale(config.dim, factor) if config.num_classes and factor != 1.0 else None


def reset_head(head: nn.Linear, config: ViTConfig) -> None:
    """Initialise a classifier: zeros where the residual method asks for them."""
    if RESIDUALS.metadata(config.residual).zero_head:
        nn.init.zeros_(head.weight)
    else:
        nn.init.trunc_normal_(head.weight, std=STD)
    nn.init.zeros_(head.bias)


def config_transfer(config: ViTConfig) -> Transfer:
    """Ratios of depth and width to those that the learning rate was tuned at."""
    names = ("depth", "dim", "base_depth", "base_dim")
    return transfer_of(config.residual, **{name: getattr(config, name) for name in names})
