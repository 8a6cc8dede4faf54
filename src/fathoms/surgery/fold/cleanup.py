"""Clean a folded model: remove the modules, parameters and config fields whose scales are ones by now."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.models.vit import ViT
from fathoms.parts.norms.norm import NoNorm, split_affine
from fathoms.parts.norms.scaler import LearnableScaler, LearnableScaler2d
from fathoms.parts.residuals.residual import RESIDUALS, LayerScale, ReZero, Scalar, Unscaled
from fathoms.surgery.fold.affine_parts import AffinePart
from fathoms.surgery.fold.arithmetic import Weights
from fathoms.surgery.fold.graph import shape_of
from fathoms.surgery.inputs import difference, run
from fathoms.surgery.replace import replace_module
from fathoms.surgery.swap.sites import kind_of, layout_of

# What became of a folded part; "set to one" where the model's own code multiplies by it.
Fate = Literal["removed", "statistics only", "set to one"]
# What a module of another library raises when it cannot do without its parameters.
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError)


@torch.no_grad()
def clean(
    model: nn.Module, parts: list[AffinePart], weights: Weights, images: Tensor
) -> dict[AffinePart, Fate]:
    """Remove what is left of the folded `parts`, in place; the result for each part."""
    fates = {part: _clear(model, part, weights) for part in parts}
    ones = [name for part, fate in fates.items() if fate == "set to one" for name in part.parameters]
    dropped = _drop_ones(model, ones, weights, images)
    _drop_scales_of_one(model)
    _follow_config(model, images)
    return {part: "removed" if dropped.issuperset(part.parameters) else fate for part, fate in fates.items()}


def _clear(model: nn.Module, part: AffinePart, weights: Weights) -> Fate:
    """Replace the module that a part belonged to, as far as its own code allows."""
    owners = {weights.owner(name)[0] for name in part.parameters}
    if len(owners) != 1:
        return "set to one"
    owner = owners.pop()
    identity = _identity_for(owner)
    if identity is not None:
        replace_module(model, owner, identity)
        return "removed"
    if getattr(owner, "affine_names", None) == _attributes(part):
        replace_module(model, owner, split_affine(owner)[0])
        return "statistics only"
    return _clear_foreign(model, owner, part, weights)


def _attributes(part: AffinePart) -> tuple[str | None, str | None]:
    """The names of a part's scale and shift in their owner."""
    names = [None if name is None else name.rpartition(".")[2] for name in (part.weight, part.bias)]
    return names[0], names[1]


def _identity_for(module: nn.Module) -> nn.Module | None:
    """The module of fathoms that does nothing, in the place of one that only scales and shifts."""
    if isinstance(module, LearnableScaler2d):
        return nn.Identity()
    if isinstance(module, LearnableScaler):
        return NoNorm(module.num_channels)
    if isinstance(module, LayerScale):
        return Unscaled(module.gamma.shape[0])
    return Unscaled(module.dim) if isinstance(module, Scalar) else None


def _clear_foreign(model: nn.Module, owner: nn.Module, part: AffinePart, weights: Weights) -> Fate:
    """Replace a module of another library, if a trial shows that it then computes the same."""
    names = _attributes(part)
    if list(owner.children()) or {*names} - {None} != {name for name, _ in owner.named_parameters()}:
        return "set to one"
    use, like = part.uses[0], weights.get(part.parameters[0])
    is_norm = kind_of(owner) in ("layernorm", "rmsnorm")
    if use.entry is None and not is_norm:
        return "set to one"
    x = torch.randn(shape_of(use.last), device=like.device).to(like.dtype)
    if use.entry is None and use.axis == x.ndim - 1 and layout_of(owner) == "first":
        # A norm for maps works on channels-last tensors inside, and is called with the channels second.
        x = x.movedim(-1, 1)
    try:
        y = owner(x.clone())
        if use.entry is not None and torch.equal(y, x):
            replace_module(model, owner, nn.Identity())
            return "removed"
        if is_norm:
            rest = split_affine(owner, names)[0]
            if torch.allclose(rest(x), y, rtol=1e-5, atol=1e-6):
                replace_module(model, owner, rest)
                return "statistics only"
    except _REFUSALS:
        pass
    return "set to one"


def _drop_ones(model: nn.Module, names: list[str], weights: Weights, images: Tensor) -> set[str]:
    """Set scales that a block multiplies by itself to None, where its code allows for that; returns which.

    BEiT, EVA and ConvNeXt ask whether there is a scale; CaiT does not, and keeps its ones.
    """
    groups: dict[tuple[type, str], list[str]] = {}
    for name in names:
        owner, attribute = weights.owner(name)
        groups.setdefault((type(owner), attribute), []).append(name)
    dropped: set[str] = set()
    expected = run(model, images) if names else []
    for group in groups.values():
        kept = {name: weights.get(name) for name in group}
        for name in group:
            owner, attribute = weights.owner(name)
            setattr(owner, attribute, None)
        try:
            if difference(expected, run(model, images)) <= 1e-6:
                dropped.update(group)
                continue
        except _REFUSALS:
            pass
        for name, parameter in kept.items():
            owner, attribute = weights.owner(name)
            setattr(owner, attribute, parameter)
    return dropped


def _drop_scales_of_one(model: nn.Module) -> None:
    """Replace residual scales of exactly one, folded or not, by fathoms' own module for "none"."""
    for module in [m for m in model.modules() if isinstance(m, ReZero)]:
        if bool((module.alpha == 1).all()):
            replace_module(model, module, Unscaled(module.dim))


def _follow_config(model: nn.Module, images: Tensor) -> None:
    """Give a folded fathoms model the config of the plain network that it has become, if it has."""
    if isinstance(model, ViT) and RESIDUALS.metadata(model.config.residual).alpha is not None:
        # Its constants are in the weights now, whose names are the same: nothing may multiply by them again.
        model.config = model.config.replace(residual="none")
    if not isinstance(model, ViT) or not isinstance(model.norm, NoNorm):
        return
    plain = {"norm": "none", "norm_init": None, "norm_by_depth": None, "final_norm": None, "drop_path": 0.0}
    plain |= {"residual": "none", "attn_placement": "pre", "mlp_placement": "pre", "placement_by_depth": None}
    for more in ({}, {"qkv_bias": True}):
        try:
            config = model.config.replace(**plain, **more)
            twin = ViT(config).to(images.device, images.dtype).eval()
            twin.load_state_dict(model.state_dict())
        except (FathomsError, RuntimeError):
            continue
        if torch.equal(twin(images), model(images)):
            model.config = config
            return
