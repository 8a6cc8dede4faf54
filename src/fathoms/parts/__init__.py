"""The parts a Vision Transformer is made of, each usable alone.

>>> import torch
>>> from fathoms.parts import DyT, LayerScale, SelfAttention
>>> x = torch.randn(2, 197, 192)
>>> (x + LayerScale(192)(SelfAttention(192, heads=3)(DyT(192)(x)))).shape
torch.Size([2, 197, 192])
"""

import inspect
from typing import Any, cast

from torch import nn

from fathoms.parts.attention import (
    ATTENTIONS,
    GATES,
    ChannelGate,
    ClassAttention,
    HeadGate,
    SelfAttention,
    TalkingHeadsAttention,
)
from fathoms.parts.block import Block, ClassBlock, Join
from fathoms.parts.mlp import MLPS, GeluMLP, SwiGLU
from fathoms.parts.modes import refuse_script
from fathoms.parts.norms import (
    NORMS,
    Derf,
    DyT,
    LayerNorm,
    LearnableScaler,
    LearnableScaler2d,
    NoNorm,
    RMSNorm,
    ScaleNorm,
)
from fathoms.parts.placements import PLACEMENTS, DropPath
from fathoms.parts.position import (
    POSITIONS,
    LearnedPosition,
    LearnedRotaryPosition,
    NoPosition,
    RotaryPosition,
    SinCosPosition,
)
from fathoms.parts.readout import (
    READOUTS,
    ClassAttentionReadout,
    ClassToken,
    MeanBesideClassToken,
    MeanToken,
    SequencePool,
)
from fathoms.parts.residual_updates import (
    MeanVarianceSplit,
    OrthogonalUpdate,
    ProgressiveResidual,
    set_progress,
)
from fathoms.parts.residuals import (
    RESIDUALS,
    DeepNorm,
    DepthTransfer,
    FixupScale,
    LayerNormScaling,
    LayerScale,
    ReZero,
    SkipInit,
)
from fathoms.parts.rope import Rope2d
from fathoms.parts.stem import STEM_NORMS, STEMS, ConvStem, DualPatchNorm, PatchEmbed, patchify
from fathoms.registry import Registry

__all__ = [
    "ATTENTIONS",
    "GATES",
    "LEAVES",
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


def describe(part: nn.Module) -> str:
    """The constructor's arguments that a part keeps: `768, init_value=1e-4` of `LayerScale(768, init_value=1e-4)`."""
    _, *names = inspect.signature(type(part).__init__).parameters
    kept = {name: getattr(part, name, None) for name in names}
    own = next(part.parameters(recurse=False), None)
    if names and names[0] == "dim" and kept["dim"] is None and own is not None:
        kept["dim"] = own.shape[-1]
    shown = {
        name: plain(value) for name, value in kept.items() if isinstance(value, bool | int | float | str)
    }
    return ", ".join(text if name == names[0] else f"{name}={text}" for name, text in shown.items())


def plain(value: Any) -> str:
    """A value as it is written in code: 1e-4, 0.5, 'normal'.

    >>> plain(1e-4), plain(0.5), plain(0.0), plain("ones")
    ('1e-4', '0.5', '0.0', "'ones'")
    """
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.6e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return repr(value)


def prints_nothing(value: Any) -> bool:
    """Whether something is a module's class without an `extra_repr` of its own."""
    return (
        isinstance(value, type) and issubclass(value, nn.Module) and value.extra_repr is nn.Module.extra_repr
    )


LEAVES = tuple(
    {part for family in (STEMS, POSITIONS, READOUTS, NORMS) for part in map(family.__getitem__, family)}
)
LEAVES = (Block, *cast(tuple[type[nn.Module], ...], LEAVES))
"""What torch.fx keeps whole in a graph of a ViT: blocks, and the stages before and after them."""


# A new part prints its arguments by being registered or exported.
_registered = [family[name] for family in families().values() for name in family]
for _part in filter(prints_nothing, [*_registered, *list(globals().values())]):
    _part.extra_repr = describe
for _part in _registered:
    if isinstance(_part, type) and issubclass(_part, nn.Module) and "forward" in vars(_part):
        _part.__prepare_scriptable__ = refuse_script  # pyrefly: ignore
