"""Take modules out of a folded model whose scales and shifts have become ones and zeros."""

from __future__ import annotations

import torch
from torch import nn

from fathoms.errors import FathomsError
from fathoms.models.vit import ViT
from fathoms.surgery.fold.affine_parts import AffinePart
from fathoms.surgery.fold.arithmetic import Weights
from fathoms.surgery.fold.bare import bare_of
from fathoms.surgery.fold.graph import shape_of
from fathoms.surgery.inputs import difference, run
from fathoms.surgery.replace import replace_module
from fathoms.surgery.swap.sites import kind_of, layout_of

REMOVED, BARE, NEUTRAL = "removed", "statistics only", "set to one"


def neutralise(part: AffinePart, weights: Weights) -> None:
    """Ones for the scale, zeros for the shift."""
    for name, value in ((part.weight, 1.0), (part.bias, 0.0)):
        if name is not None:
            weights.put(name, torch.full_like(weights.get(name), value))


@torch.no_grad()
def clear(model: nn.Module, part: AffinePart, weights: Weights) -> str:
    """Replace the module a part belonged to, as far as its own code allows; what became of it."""
    owners = {weights.owner(name)[0] for name in part.parameters}
    if len(owners) != 1:
        return NEUTRAL
    owner = owners.pop()
    bare = bare_of(owner)
    if bare is not None:
        replace_module(model, owner, bare)
        return BARE if bare.__class__.__name__.startswith("Bare") else REMOVED
    own = {name.rpartition(".")[2] for name in part.parameters}
    if list(owner.children()) or own != {name for name, _ in owner.named_parameters()}:
        return NEUTRAL
    use = part.uses[0]
    x = torch.randn(shape_of(use.last), device=weights.get(part.parameters[0]).device)
    x = x.to(weights.get(part.parameters[0]).dtype)
    # A norm for maps works on channels-last tensors inside, and is called with the channels second.
    x = (
        x.movedim(-1, 1)
        if use.entry is None and use.axis == x.ndim - 1 and layout_of(owner) == "first"
        else x
    )
    if use.entry is not None and _gives_back(owner, x):
        replace_module(model, owner, nn.Identity())
        return REMOVED
    if kind_of(owner) in ("layernorm", "rmsnorm") and _without_parameters(owner, x):
        return BARE
    return NEUTRAL


def _gives_back(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether a module with ones and zeros inside is the identity, to the last bit."""
    try:
        return torch.equal(module(x.clone()), x)
    except (RuntimeError, TypeError, ValueError):
        return False


def _without_parameters(norm: nn.Module, x: torch.Tensor) -> bool:
    """Take weight and bias out of a norm of another library, if it then does the same; whether it does."""
    try:
        expected = norm(x)
    except (RuntimeError, TypeError, ValueError):
        return False
    kept = dict(norm.named_parameters())
    flag = getattr(norm, "elementwise_affine", None)
    for name in kept:
        setattr(norm, name, None)
    if flag is not None:
        norm.elementwise_affine = False  # pyrefly: ignore
    try:
        if torch.allclose(norm(x), expected, rtol=1e-5, atol=1e-6):
            return True
    except (RuntimeError, TypeError, ValueError, AttributeError):
        pass
    for name, parameter in kept.items():
        setattr(norm, name, parameter)
    if flag is not None:
        norm.elementwise_affine = flag  # pyrefly: ignore
    return False


def is_neutral(part: AffinePart, weights: Weights) -> bool:
    """Whether a part is ones and zeros already."""
    values = ((part.weight, 1.0), (part.bias, 0.0))
    return all(name is None or bool((weights.get(name) == value).all()) for name, value in values)


def drop_ones(model: nn.Module, names: list[str], images: torch.Tensor) -> set[str]:
    """Set scales that a block multiplies by itself to None, where its code allows for that; which ones.

    BEiT, EVA and ConvNeXt ask whether there is a scale; CaiT does not, and keeps its ones.
    """
    weights = Weights(model)
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
        except (RuntimeError, TypeError, ValueError, AttributeError):
            pass
        for name, parameter in kept.items():
            owner, attribute = weights.owner(name)
            setattr(owner, attribute, parameter)
    return dropped


def follow_config(model: nn.Module, images: torch.Tensor) -> bool:
    """Let a folded fathoms model carry the config of the plain network it has become, if it has."""
    if not isinstance(model, ViT):
        return False
    plain = {"norm": "none", "norm_init": None, "norm_by_depth": None, "final_norm": None, "drop_path": 0.0}
    plain |= {"residual": "none", "residual_init": None, "attn_placement": "pre", "mlp_placement": "pre"}
    for more in ({}, {"qkv_bias": True}):
        try:
            config = model.config.replace(**plain, **more)
            twin = ViT(config).to(images.device, images.dtype).eval()
            twin.load_state_dict(model.state_dict())
        except (FathomsError, RuntimeError):
            continue
        with torch.no_grad():
            if torch.equal(twin(images), model(images)):
                model.config = config
                return True
    return False
