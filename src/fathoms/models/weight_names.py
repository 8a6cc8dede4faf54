"""Names of weights: timm's, which DeiT, CaiT, LearnableScaler and ViT-5 share, and settings that names and shapes tell.

timm keeps the patch projection as a convolution; here it is the same matrix with its columns in the order (row,
column, channel). And timm's plain ViT keeps the position of the class token in front of those of the patches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fathoms.errors import WeightsError
from fathoms.models.config import ViTConfig

State = dict[str, Tensor]

_PREFIXES = ("module.", "_orig_mod.", "model.")


def unprefixed(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    return re.sub(r"^(module\.|_orig_mod\.|model\.)+", "", name)


# timm's name inside a block, and ours. The first that matches wins.
_BLOCK_NAMES = {
    "norm1.": "attn_join.norm.",
    "norm2.": "mlp_join.norm.",
    "gamma_1": "attn_join.scale.gamma",
    "gamma_2": "mlp_join.scale.gamma",
    "ls1.": "attn_join.scale.",
    "ls2.": "mlp_join.scale.",
}


def unwrap(state: Mapping[str, object]) -> State:
    """The tensors of a checkpoint, taken out of a "model" or "state_dict" entry, without wrappers' prefixes."""
    for key in ("model", "state_dict"):
        inner = state.get(key)
        if isinstance(inner, Mapping):
            state = inner
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if len(tensors) != len(state) or not tensors:
        raise WeightsError(
            "weights: not a mapping of names to tensors; give a state_dict or a .safetensors file"
        )
    while prefix := next((p for p in _PREFIXES if all(key.startswith(p) for key in tensors)), None):
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def layout_of(state: State) -> str:
    """The naming scheme of a state dict: "fathoms" or "timm"."""
    if "stem.proj.weight" in state or "stem.convs.0.weight" in state:
        return "fathoms"
    if "patch_embed.proj.weight" in state:
        return "timm"
    raise WeightsError("weights: neither fathoms' nor timm's names (no patch projection among the keys)")


def conv_to_linear(weight: Float[Tensor, "D C P P"]) -> Float[Tensor, "D F"]:
    """A patch convolution as the matrix on patches flattened in the order (row, column, channel)."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def linear_to_conv(weight: Float[Tensor, "D F"], patch_size: int) -> Float[Tensor, "D C P P"]:
    """The inverse of `conv_to_linear`."""
    return weight.unflatten(1, (patch_size, patch_size, -1)).permute(0, 3, 1, 2).contiguous()


def _ours(name: str) -> str:
    """The fathoms name of a timm name, for tensors that are only renamed."""
    match = re.fullmatch(r"(blocks|blocks_token_only)\.(\d+)\.(.+)", name)
    if match is None:
        # A norm of the mean is the final norm of readout mean_cls; `load_weights` refuses it for any other.
        return name.replace("patch_embed.proj.", "stem.proj.").replace("fc_norm.", "norm.")
    stage = "blocks" if match[1] == "blocks" else "readout.blocks"
    rest = match[3]
    for theirs, ours in _BLOCK_NAMES.items():
        if rest.startswith(theirs):
            rest = ours + rest.removeprefix(theirs)
            break
    return f"{stage}.{match[2]}.{rest}"


def from_timm(state: State) -> State:
    """Timm's weights under fathoms' names."""
    state = dict(state)
    special = ("cls_token", "dist_token", "pos_embed", "reg_token", "patch_embed.proj.weight")
    for name in special:
        if name in state and state[name].ndim not in ((2, 4) if name == special[-1] else (3,)):
            raise WeightsError(f"weights: {name} has shape {tuple(state[name].shape)}, unlike any of timm's")
    cls, dist, positions, registers, projection = (state.pop(name, None) for name in special)
    ours = {_ours(name): value for name, value in state.items()}
    if projection is not None:
        ours["stem.proj.weight"] = conv_to_linear(projection) if projection.ndim == 4 else projection
    if registers is not None:
        ours["registers"] = registers.flatten(0, 1)
    queries = [token.flatten(0, 1) for token in (cls, dist) if token is not None]
    if positions is not None:
        positions = positions.flatten(0, 1)
        front = positions.shape[0] - math.isqrt(positions.shape[0]) ** 2
        if queries and front == len(queries) and all(q.shape == positions[:1].shape for q in queries):
            ours["readout.positions"], positions = positions[:front], positions[front:]
        ours["position.table"] = positions
    if len({token.shape[1:] for token in queries}) > 1:
        raise WeightsError("weights: cls_token and dist_token differ in width; they are not from one model")
    if queries:
        ours["readout.queries"] = torch.cat(queries)
    return ours


def why_not_timm(config: ViTConfig) -> str | None:
    """The reason why timm has no model of this config, or None."""
    expected = {
        "attn_placement": ("pre",),
        "mlp_placement": ("pre",),
        "residual": ("none", "layerscale"),
        "stem_norm": ("none",),
        "position": ("learned",),
        "mlp": ("gelu",),
        "norm_by_depth": (None,),
        "placement_by_depth": (None,),
        "stem": ("patch",),
        "attn_gate": ("none",),
        "class_token_block": (0,),
        "readout": ("cls", "mean", "mean_cls", "class_attention"),
    }
    for field, allowed in expected.items():
        value = getattr(config, field)
        if value not in allowed:
            return f"{field}={value!r} has no place in timm's layout"
    if config.readout == "class_attention" and (config.distill_token or config.registers):
        return "timm's CaiT has neither a distillation token nor registers"
    return None


def to_timm(state: State, config: ViTConfig) -> State:
    """Fathoms' weights under timm's names, for timm's model of the same architecture."""
    reason = why_not_timm(config)
    if reason:
        raise WeightsError(f'weights: {reason}; save with layout="fathoms"')
    cait = config.readout == "class_attention"
    scale = "gamma_{}" if cait else "ls{}.gamma"
    inner = {
        "attn_join.norm.": "norm1.",
        "mlp_join.norm.": "norm2.",
        "attn_join.scale.gamma": scale.format(1),
        "mlp_join.scale.gamma": scale.format(2),
        "readout.blocks.": "blocks_token_only.",
        "stem.proj.": "patch_embed.proj.",
    }
    theirs: State = {}
    for name, value in state.items():
        for ours, other in inner.items():
            name = name.replace(ours, other)
        if config.readout == "mean_cls" and name.startswith("norm."):
            name = f"fc_{name}"
        theirs[name] = value
    theirs["patch_embed.proj.weight"] = linear_to_conv(theirs["patch_embed.proj.weight"], config.patch_size)
    positions = theirs.pop("position.table")
    queries = theirs.pop("readout.queries", None)
    if "registers" in theirs:
        theirs["reg_token"] = theirs.pop("registers")[None]
    if queries is not None:
        theirs["cls_token"] = queries[None, :1].clone()
        if config.distill_token:
            theirs["dist_token"] = queries[None, 1:].clone()
    if (placed := theirs.pop("readout.positions", None)) is not None:
        positions = torch.cat([placed, positions])
    theirs["pos_embed"] = positions[None]
    return theirs


def resize_positions(table: Float[Tensor, "N D"], grid: int, antialias: bool = True) -> Float[Tensor, "M D"]:
    """A table of positions for another square grid: bicubic, antialiased as in timm; DeiT's own code does without."""
    old = math.isqrt(table.shape[0])
    if not old or old * old != table.shape[0]:
        raise WeightsError(f"weights: {table.shape[0]} positions are not a square grid and cannot be resized")
    maps = table.float().T.unflatten(1, (old, old))[None]
    maps = F.interpolate(maps, size=(grid, grid), mode="bicubic", antialias=antialias)
    return maps[0].flatten(1).T.to(table.dtype)


Shapes = Mapping[str, tuple[int, ...]]


def settings_in(shapes: Shapes, in_channels: int) -> dict[str, Any]:
    """Settings that can be read off the names and shapes of weights under fathoms' names."""
    found: dict[str, Any] = {
        "depth": _count(shapes, r"blocks\.(\d+)\..*"),
        "registers": shapes.get("registers", (0,))[0],
        "distill_token": shapes.get("readout.queries", (0,))[:1] == (2,) or "readout.distill" in shapes,
        "distill_early": "readout.distill" in shapes,
        "num_classes": shapes.get("head.weight", (0,))[0],
    }
    if _count(shapes, r"readout\.blocks\.(\d+)\..*"):
        found["readout"] = "class_attention"
        found["class_attention_depth"] = _count(shapes, r"readout\.blocks\.(\d+)\..*")
    stem = shapes.get("stem.proj.weight", ())
    if len(stem) == 2:
        found["dim"] = stem[0]
        side = math.isqrt(stem[1] // in_channels)
        if side * side * in_channels == stem[1]:
            found["patch_size"] = side
    return found


def _count(shapes: Shapes, pattern: str) -> int:
    numbers = [int(match[1]) for name in shapes if (match := re.fullmatch(pattern, name))]
    return 1 + max(numbers) if numbers else 0


def misfits(config: ViTConfig, shapes: Shapes, skipped: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, each with its value in the weights and in the model.

    Args:
        config: The model's.
        shapes: The weights', by fathoms' names.
        skipped: Parameters that are not loaded.
    """
    held = settings_in(shapes, config.in_channels)
    if "head.weight" in skipped:
        del held["num_classes"]
    own = config.to_dict()
    return {name: (value, own[name]) for name, value in held.items() if value != own[name]}
