"""Prepare a copy of a model for folding: the same function, in operations that folding recognises."""

from __future__ import annotations

import torch
from torch import nn

from fathoms.parts.linear import ScaledLinear
from fathoms.parts.residuals.prores import ProgressiveResidual
from fathoms.parts.residuals.residual import DepthTransfer, LayerNormScaling, ReZero
from fathoms.surgery.inputs import home_of
from fathoms.surgery.replace import replace_module

# Stochastic depth of fathoms and timm, torchvision, and transformers: the identity in inference.
_DROP_PATHS = ("DropPath", "StochasticDepth")


def prepare(model: nn.Module) -> int:
    """Bring a model in inference mode into normal form, in place; returns how many drop paths were removed."""
    drop_paths = _remove_drop_path(model)
    _join_biases(model)
    _learn_constants(model)
    return drop_paths


def _remove_drop_path(model: nn.Module) -> int:
    """Replace stochastic depth by identities; returns how many."""
    found = [m for m in model.modules() if type(m).__name__.endswith(_DROP_PATHS)]
    for module in found:
        replace_module(model, module, nn.Identity())
    return len(found)


@torch.no_grad()
def _join_biases(model: nn.Module) -> None:
    """Pack the separate q and v biases of BEiT and EVA into one bias of their packed projection.

    Those models concatenate a bias in every forward pass, with zeros for k that are not saved. A packed bias is
    what their own code uses when there is no `q_bias`.
    """
    for module in model.modules():
        parts = [getattr(module, f"{letter}_bias", None) for letter in "qkv"]
        packed = getattr(module, "qkv", None)
        if isinstance(packed, nn.Linear) and packed.bias is None and all(part is not None for part in parts):
            packed.bias = nn.Parameter(torch.cat(parts), requires_grad=packed.weight.requires_grad)  # pyrefly: ignore
            for letter in "qkv":
                setattr(module, f"{letter}_bias", None)


@torch.no_grad()
def _learn_constants(model: nn.Module) -> None:
    """Turn the constants of LayerNorm Scaling, CompleteP and ProRes into parameters, which fold like other scales."""
    for module in [m for m in model.modules() if isinstance(m, DepthTransfer | LayerNormScaling)]:
        scale = ReZero(module.dim, init_value=module.factor).to(**home_of(model))  # pyrefly: ignore
        replace_module(model, module, scale)
    for module in [m for m in model.modules() if isinstance(m, ProgressiveResidual)]:
        # One, unless its run is still warming up.
        scale = ReZero(module.dim, init_value=module.factor.item()).to(**home_of(model))  # pyrefly: ignore
        replace_module(model, module, scale)
    for module in [m for m in model.modules() if isinstance(m, ScaledLinear)]:
        replace_module(model, module, module.plain())
