"""Bring a copy of a model into the plain form that folding reads; what it computes stays the same."""

from __future__ import annotations

import torch
from torch import nn

from fathoms.parts.residual import LayerNormScaling, ReZero, Unscaled
from fathoms.surgery.replace import replace_module
from fathoms.surgery.swap.new_norm import home_of

# Stochastic depth of fathoms and timm, torchvision, and transformers: all do nothing in inference.
_DROP_PATHS = ("DropPath", "StochasticDepth")


def remove_drop_path(model: nn.Module) -> int:
    """Put identities in the place of stochastic depth; how many."""
    found = [m for m in model.modules() if type(m).__name__.endswith(_DROP_PATHS)]
    for module in found:
        replace_module(model, module, nn.Identity())
    return len(found)


@torch.no_grad()
def join_biases(model: nn.Module) -> None:
    """Put the separate q and v biases of BEiT and EVA into one bias of their packed projection.

    Those models add a bias that is concatenated in every run, with zeros for k that are not saved. A packed
    bias is what their own code takes when there is no `q_bias`.
    """
    for module in model.modules():
        parts = [getattr(module, f"{letter}_bias", None) for letter in "qkv"]
        packed = getattr(module, "qkv", None)
        if isinstance(packed, nn.Linear) and packed.bias is None and all(part is not None for part in parts):
            packed.bias = nn.Parameter(torch.cat(parts), requires_grad=packed.weight.requires_grad)  # pyrefly: ignore
            for letter in "qkv":
                setattr(module, f"{letter}_bias", None)


@torch.no_grad()
def learn_constants(model: nn.Module) -> None:
    """Make LayerNorm Scaling's constants parameters, which fold as any other scale does."""
    for module in [m for m in model.modules() if isinstance(m, LayerNormScaling)]:
        scale = ReZero(module.dim, init_value=module.factor).to(**home_of(model))  # pyrefly: ignore
        replace_module(model, module, scale)


def plain_scales(model: nn.Module) -> None:
    """Drop scales of ones that a name still leads to: fathoms' own module for "none"."""
    for module in [m for m in model.modules() if isinstance(m, ReZero)]:
        if bool((module.alpha == 1).all()):
            replace_module(model, module, Unscaled(module.dim))
