"""The parts a Vision Transformer is made of, each usable alone."""

from typing import Any

from fathoms.parts.attention import ATTENTIONS, ClassAttention, SelfAttention, TalkingHeadsAttention
from fathoms.parts.block import Block, ClassBlock, Join
from fathoms.parts.drop_path import DropPath
from fathoms.parts.dyt import Derf, DyT
from fathoms.parts.mlp import MLPS, GeluMLP, SwiGLU
from fathoms.parts.norm import NORMS, LayerNorm, NoNorm, RMSNorm, ScaleNorm
from fathoms.parts.position import (
    POSITIONS,
    LearnedPosition,
    LearnedRotaryPosition,
    NoPosition,
    RotaryPosition,
    SinCosPosition,
)
from fathoms.parts.readout import READOUTS, ClassAttentionReadout, ClassToken, MeanToken
from fathoms.parts.residual import (
    RESIDUALS,
    DeepNorm,
    FixupScale,
    LayerNormScaling,
    LayerScale,
    ReZero,
    SkipInit,
)
from fathoms.parts.rope import Rope2d
from fathoms.parts.scaler import LearnableScaler, LearnableScaler2d
from fathoms.parts.stem import STEM_NORMS, DualPatchNorm, PatchEmbed, patchify
from fathoms.registry import Registry

__all__ = [
    "ATTENTIONS",
    "MLPS",
    "NORMS",
    "POSITIONS",
    "READOUTS",
    "RESIDUALS",
    "STEM_NORMS",
    "Block",
    "ClassAttention",
    "ClassAttentionReadout",
    "ClassBlock",
    "ClassToken",
    "DeepNorm",
    "Derf",
    "DropPath",
    "DualPatchNorm",
    "DyT",
    "FixupScale",
    "GeluMLP",
    "Join",
    "LayerNorm",
    "LayerNormScaling",
    "LayerScale",
    "LearnableScaler",
    "LearnableScaler2d",
    "LearnedPosition",
    "LearnedRotaryPosition",
    "MeanToken",
    "NoNorm",
    "NoPosition",
    "PatchEmbed",
    "RMSNorm",
    "ReZero",
    "Rope2d",
    "RotaryPosition",
    "ScaleNorm",
    "SelfAttention",
    "SinCosPosition",
    "SkipInit",
    "SwiGLU",
    "TalkingHeadsAttention",
    "families",
    "patchify",
]


def families() -> dict[str, Registry[Any, Any]]:
    """Each registry under the name of the ViTConfig field that picks from it."""
    return {
        "norm": NORMS,
        "residual": RESIDUALS,
        "stem_norm": STEM_NORMS,
        "attention": ATTENTIONS,
        "position": POSITIONS,
        "readout": READOUTS,
        "mlp": MLPS,
    }
