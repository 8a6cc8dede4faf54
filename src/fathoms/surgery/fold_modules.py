"""The modules of a model before a fold, in the form that it recognises, and after it, without what is folded."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import nn

from fathoms.errors import FathomsError
from fathoms.models.vit import ViT
from fathoms.parts import RESIDUALS
from fathoms.parts.linears import has_hooks
from fathoms.parts.norms import LearnableScaler, LearnableScaler2d, NoNorm, split_affine
from fathoms.parts.residual_updates import ProgressiveResidual
from fathoms.parts.residuals import DepthTransfer, LayerNormScaling, LayerScale, ReZero, Scalar, Unscaled
from fathoms.surgery.fold_absorb import Weights
from fathoms.surgery.fold_graph import AffinePart, shape_of
from fathoms.surgery.inputs import REFUSALS, Inputs, difference, run
from fathoms.surgery.trial import home_of, replace_module

# Stochastic depth of fathoms and timm, torchvision, and transformers: the identity in inference.
_DROP_PATHS = ("DropPath", "StochasticDepth")


def prepare(model: nn.Module) -> int:
    """Bring a model in inference mode into normal form, in place; returns how many drop paths were removed."""
    drop_paths = [module for module in model.modules() if type(module).__name__.endswith(_DROP_PATHS)]
    for module in drop_paths:
        replace_module(model, module, nn.Identity())
    _join_biases(model)
    _learn_constants(model)
    return len(drop_paths)


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
    constants = DepthTransfer | LayerNormScaling | ProgressiveResidual
    for module in [m for m in model.modules() if isinstance(m, constants)]:
        # That of ProRes is one, unless its run is still warming up.
        scale = ReZero(module.dim, init_value=float(module.factor)).to(**home_of(model))  # pyrefly: ignore
        replace_module(model, module, scale)
    for vit in [m for m in model.modules() if isinstance(m, ViT)]:
        if vit.head_scale is not None:
            for head in filter(None, (vit.head, vit.head_dist)):
                cast(nn.Linear, head).weight.mul_(vit.head_scale.factor)
            vit.head_scale = None


# What became of a folded part; "set to one" where the model's own code multiplies by it.
Fate = Literal["removed", "statistics only", "set to one"]


@torch.no_grad()
def clean(
    model: nn.Module, parts: list[AffinePart], weights: Weights, images: Inputs
) -> dict[AffinePart, Fate]:
    """Remove what is left of the folded `parts`, in place; the result for each part."""
    fates = {part: _clear(model, part, weights) for part in parts}
    ones = [name for part, fate in fates.items() if fate == "set to one" for name in part.parameters]
    dropped = _drop_ones(model, ones, weights, images)
    # Residual scales of exactly one, folded or not, are fathoms' own module for "none".
    for module in [m for m in model.modules() if isinstance(m, ReZero) and bool((m.alpha == 1).all())]:
        replace_module(model, module, Unscaled(module.dim))
    _follow_config(model, images)
    return {part: "removed" if dropped.issuperset(part.parameters) else fate for part, fate in fates.items()}


def _clear(model: nn.Module, part: AffinePart, weights: Weights) -> Fate:
    """Replace the module that a part belonged to, if a trial on random numbers shows that it then computes the same."""
    owner, *others = {weights.owner(name)[0] for name in part.parameters}
    if others or has_hooks(owner):
        return "set to one"
    if (identity := _identity_for(owner)) is not None:
        replace_module(model, owner, identity)
        return "removed"
    if list(owner.children()):
        return "set to one"
    names = [None if name is None else name.rpartition(".")[2] for name in (part.weight, part.bias)]
    use, like = part.uses[0], weights.get(part.parameters[0])
    x = torch.randn(shape_of(use.last), generator=torch.Generator().manual_seed(0)).to(like)
    # A norm for maps works on channels-last tensors inside, and is called with the channels second.
    for given in (x, x.movedim(-1, 1)):
        try:
            y = owner(given.clone())
            if use.entry is not None and torch.equal(y, given):
                replace_module(model, owner, nn.Identity())
                return "removed"
            rest = split_affine(owner, (names[0], names[1]))[0]
            if torch.allclose(rest(given), y, rtol=1e-5, atol=1e-6):
                replace_module(model, owner, rest)
                return "statistics only"
        except REFUSALS:
            continue
    return "set to one"


def _identity_for(module: nn.Module) -> nn.Module | None:
    """The module of fathoms that does nothing, in the place of one that only scales and shifts."""
    if isinstance(module, LearnableScaler2d):
        return nn.Identity()
    if isinstance(module, LearnableScaler):
        return NoNorm(module.num_channels)
    if isinstance(module, LayerScale):
        return Unscaled(module.gamma.shape[0])
    return Unscaled(module.dim) if isinstance(module, Scalar) else None


def _drop_ones(model: nn.Module, names: list[str], weights: Weights, images: Inputs) -> set[str]:
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
        kept = [(*weights.owner(name), weights.get(name)) for name in group]
        for owner, attribute, _ in kept:
            setattr(owner, attribute, None)
        try:
            same = difference(expected, run(model, images)) <= 1e-6
        except REFUSALS:
            same = False
        if same:
            dropped.update(group)
            continue
        for owner, attribute, parameter in kept:
            setattr(owner, attribute, parameter)
    return dropped


def _follow_config(model: nn.Module, images: Inputs) -> None:
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
            twin = ViT(config).to(**home_of(model)).eval()  # pyrefly: ignore
            twin.load_state_dict(model.state_dict())
        except (FathomsError, RuntimeError):
            continue
        if difference(run(twin, images), run(model, images)) == 0.0:
            model.config = config
            return
