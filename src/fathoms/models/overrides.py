"""The fields of ViTConfig as keyword arguments, so that editors and checkers know them; a test holds the two equal."""

from __future__ import annotations

from typing import TypedDict

from fathoms.models.config import (
    MLP,
    Attention,
    AttnGate,
    Norm,
    Placement,
    Position,
    QKNorm,
    Readout,
    Residual,
    Schedule,
    Stem,
    StemInit,
    StemNorm,
)


class Overrides(TypedDict, total=False):
    """Fields of ViTConfig that `create_model` takes besides `num_classes` and `image_size`."""

    patch_size: int
    in_channels: int
    dim: int
    depth: int
    heads: int
    mlp_ratio: float
    norm: Norm
    norm_init: float | str | None
    final_norm: Norm | None
    norm_by_depth: str | None
    attn_placement: Placement
    mlp_placement: Placement
    placement_by_depth: str | None
    residual: Residual
    residual_init: float | None
    base_depth: int | None
    base_dim: int | None
    residual_warmup: float | None
    stem: Stem
    stem_layers: int
    stem_kernel: int
    stem_norm: StemNorm
    stem_init: StemInit
    attention: Attention
    qk_norm: QKNorm
    qkv_bias: bool
    attn_gate: AttnGate
    position: Position
    registers: int
    readout: Readout
    class_token_block: int
    class_attention_depth: int
    distill_token: bool
    mlp: MLP
    drop_path: float
    drop_path_schedule: Schedule


class AllFields(Overrides, total=False):
    """Every field of ViTConfig."""

    num_classes: int
    image_size: int
