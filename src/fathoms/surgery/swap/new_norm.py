"""Build the norm that replaces another, and copy the learned scale and shift into it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.parts.norms.norm import NORMS
from fathoms.parts.norms.scaler import LearnableScaler, LearnableScaler2d
from fathoms.surgery.inputs import home_of
from fathoms.surgery.replace import ChannelsFirst, ThenActivation
from fathoms.surgery.swap.sites import NormSite


@dataclass(frozen=True)
class NewNorm:
    """A new norm, and the module that goes into the model.

    Args:
        part: The norm itself, from the registry.
        module: The part, or a wrapper that changes the layout or keeps an activation.
        note: Which parameters of the old norm have no place in the new one.
    """

    part: nn.Module
    module: nn.Module
    note: str = ""


def build_part(site: NormSite, to: str, model: nn.Module) -> NewNorm:
    """The norm `to` for a site, at its own init, in the dtype and on the device of the old one, frozen if that was.

    A norm whose gain and shift have been folded away has no parameters; then those of the model decide.
    """
    eps = getattr(site.module, "eps", None) if to in ("layernorm", "rmsnorm") else None
    # In place of a trained norm it starts at the identity, not at the random scales of a new network.
    start = {"init": "ones"} if to == "learnable_scaler" else {}
    if to == "learnable_scaler" and site.layout == "first" and _is_map(site.module):
        part: nn.Module = LearnableScaler2d(site.dim, init="ones")
        module = part
    else:
        part = NORMS.build(to, site.dim, eps=eps, **start)  # pyrefly: ignore
        module = ChannelsFirst(part) if site.layout == "first" else part
    activation = getattr(site.module, "act", None)
    if site.kind in ("batchnorm", "groupnorm", "layernorm") and isinstance(activation, nn.Module):
        module = ThenActivation(module, activation)
    part.to(**(home_of(site.module) or home_of(model)))  # pyrefly: ignore
    # Those of an activation inside the old norm are not the norm's.
    replaced = list(site.module.parameters(recurse=False)) or list(model.parameters())
    part.requires_grad_(not replaced or any(parameter.requires_grad for parameter in replaced))
    return NewNorm(part, module)


def _is_map(module: nn.Module) -> bool:
    """Whether a norm with channels second sees (B, C, H, W): all but BatchNorm1d and 3d."""
    return not isinstance(module, nn.BatchNorm1d | nn.BatchNorm3d)


def learned_affine(site: NormSite, exact: bool) -> tuple[Tensor | None, Tensor | None]:
    """A norm's scale and shift; with `exact`, they include a BatchNorm's running statistics."""
    module = site.module
    if site.kind == "learnable_scaler":
        return _tensor(module, "a"), _tensor(module, "b")
    weight, bias = _tensor(module, "weight"), _tensor(module, "bias")
    if site.kind != "batchnorm" or not exact:
        return weight, bias
    mean, var = _tensor(module, "running_mean"), _tensor(module, "running_var")
    if mean is None or var is None:
        raise FathomsError(
            f"{site.name}: a BatchNorm without running statistics is not a fixed map; use how='reset'"
        )
    slope = torch.rsqrt(var.double() + float(module.eps))  # pyrefly: ignore
    slope = slope if weight is None else slope * weight.double()
    shift = -mean.double() * slope
    return slope, shift if bias is None else shift + bias.double()


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    value = getattr(module, name, None)
    return value.detach() if isinstance(value, Tensor) else None


@torch.no_grad()
def carry(site: NormSite, new: NewNorm) -> NewNorm:
    """Copy the old norm's learned scale and shift into the new part, where it has parameters for them."""
    scaler = isinstance(new.part, LearnableScaler)
    weight, bias = learned_affine(site, exact=scaler)
    places = ("a", "b") if scaler else ("weight", "bias")
    lost = []
    for name, value in zip(places, (weight, bias), strict=True):
        target = getattr(new.part, name, None)
        if value is None:
            continue
        if isinstance(target, nn.Parameter) and target.shape == value.shape:
            target.copy_(value)
        elif bool((value != (1.0 if name in ("a", "weight") else 0.0)).any()):
            lost.append({"a": "scale", "weight": "scale", "b": "shift", "bias": "shift"}[name])
    note = f"has no place for the old {' and '.join(lost)}" if lost else ""
    return NewNorm(new.part, new.module, note)
