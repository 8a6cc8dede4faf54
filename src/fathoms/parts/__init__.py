"""The parts a Vision Transformer is made of, each usable alone.

>>> import torch
>>> from fathoms.parts import DyT, LayerScale, SelfAttention
>>> x = torch.randn(2, 197, 192)
>>> (x + LayerScale(192)(SelfAttention(192, heads=3)(DyT(192)(x)))).shape
torch.Size([2, 197, 192])
"""

from typing import Any

from fathoms.names.registry import Registry
from fathoms.parts.attentions.attention import (
    ATTENTIONS,
    ClassAttention,
    SelfAttention,
    TalkingHeadsAttention,
)
from fathoms.parts.attentions.gate import GATES, ChannelGate, HeadGate
from fathoms.parts.block import Block, ClassBlock, Join
from fathoms.parts.describe import describe, prints_nothing
from fathoms.parts.mlp import MLPS, GeluMLP, SwiGLU
from fathoms.parts.norms.dyt import Derf, DyT
from fathoms.parts.norms.norm import NORMS, LayerNorm, NoNorm, RMSNorm, ScaleNorm
from fathoms.parts.norms.scaler import LearnableScaler, LearnableScaler2d
from fathoms.parts.residuals.drop_path import DropPath
from fathoms.parts.residuals.placement import PLACEMENTS
from fathoms.parts.residuals.prores import ProgressiveResidual, set_progress
from fathoms.parts.residuals.residual import (
    RESIDUALS,
    DeepNorm,
    DepthTransfer,
    FixupScale,
    LayerNormScaling,
    LayerScale,
    ReZero,
    SkipInit,
)
from fathoms.parts.residuals.update_rules import MeanVarianceSplit, OrthogonalUpdate
from fathoms.parts.tokens.position import (
    POSITIONS,
    LearnedPosition,
    LearnedRotaryPosition,
    NoPosition,
    RotaryPosition,
    SinCosPosition,
)
from fathoms.parts.tokens.readout import (
    READOUTS,
    ClassAttentionReadout,
    ClassToken,
    MeanBesideClassToken,
    MeanToken,
    SequencePool,
)
from fathoms.parts.tokens.rope import Rope2d
from fathoms.parts.tokens.stem import STEM_NORMS, STEMS, ConvStem, DualPatchNorm, PatchEmbed, patchify

__all__ = [
    "ATTENTIONS",
    "GATES",
    "MLPS",
    "NORMS",
    "PLACEMENTS",
    "POSITIONS",
    "READOUTS",
    "RESIDUALS",
    "STEMS",
    "STEM_NORMS",
    "Block",
    "ChannelGate",
    "ClassAttention",
    "ClassAttentionReadout",
    "ClassBlock",
    "ClassToken",
    "ConvStem",
    "DeepNorm",
    "DepthTransfer",
    "Derf",
    "DropPath",
    "DualPatchNorm",
    "DyT",
    "FixupScale",
    "GeluMLP",
    "HeadGate",
    "Join",
    "LayerNorm",
    "LayerNormScaling",
    "LayerScale",
    "LearnableScaler",
    "LearnableScaler2d",
    "LearnedPosition",
    "LearnedRotaryPosition",
    "MeanBesideClassToken",
    "MeanToken",
    "MeanVarianceSplit",
    "NoNorm",
    "NoPosition",
    "OrthogonalUpdate",
    "PatchEmbed",
    "ProgressiveResidual",
    "RMSNorm",
    "ReZero",
    "Rope2d",
    "RotaryPosition",
    "ScaleNorm",
    "SelfAttention",
    "SequencePool",
    "SinCosPosition",
    "SkipInit",
    "SwiGLU",
    "TalkingHeadsAttention",
    "families",
    "patchify",
    "set_progress",
]


def families() -> dict[str, Registry[Any, Any]]:
    """Each registry under the name of the ViTConfig field that picks from it.

    >>> list(families()["mlp"])
    ['gelu', 'swiglu']
    """
    return {
        "norm": NORMS,
        "attn_placement": PLACEMENTS,
        "mlp_placement": PLACEMENTS,
        "residual": RESIDUALS,
        "stem": STEMS,
        "stem_norm": STEM_NORMS,
        "attention": ATTENTIONS,
        "attn_gate": GATES,
        "position": POSITIONS,
        "readout": READOUTS,
        "mlp": MLPS,
    }


# A new part prints its arguments by being registered or exported.
_registered = [family[name] for family in families().values() for name in family]
for _part in filter(prints_nothing, [*_registered, *list(globals().values())]):
    _part.extra_repr = describe
