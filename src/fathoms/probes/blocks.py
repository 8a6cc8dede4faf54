"""The blocks of any Vision Transformer, found by the names of their children, and learned weights to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.parts.attention import TalkingHeadsAttention
from fathoms.parts.block import Block
from fathoms.parts.stem import PatchEmbed, sides

_ATTENTION = re.compile(r"attn|attention|mixer", re.IGNORECASE)
_OTHER_HALF = re.compile(r"mlp|ffn|feed_?forward|intermediate|linear1|fc1|norm|ln_", re.IGNORECASE)
_ATTENTION_SIDE = re.compile(
    r"attn|attention|mixer|norm_?1\b|\b(ln|n)_?1\b|layernorm_before|ls_?1\b|layer_?scale_?1|gamma_1",
    re.IGNORECASE,
)
_SCALE = re.compile(r"(^|\.)(gamma(_[12])?|lambda1|(ls|layer_?scale)_?[12](\.\w+)?)$", re.IGNORECASE)
_NORM = re.compile(r"norm|(^|\.)(ln|n)_?\d", re.IGNORECASE)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and data parallelism."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        inner: Any = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Every transformer block of a model by its name, from the first to the last.

    A block is a fathoms block, or a module with an attention among its children beside an MLP or a norm.
    """
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in blocks)
        if not inside and (isinstance(module, Block) or _looks_like_a_block(module)):
            blocks[name] = module
    if not blocks:
        raise ConfigError(
            f"probe: {type(model).__name__} has no transformer blocks (an attention beside an MLP or a norm); "
            "give a Vision Transformer"
        )
    return blocks


def _looks_like_a_block(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    names = [name for name, child in module.named_children() if not isinstance(child, nn.Identity)]
    attention = [name for name in names if _ATTENTION.search(name) and not _NORM.search(name)]
    others = [name for name in names if name not in attention and _OTHER_HALF.search(name)]
    return bool(attention) and bool(others) and not _is_stem_or_whole(module)


def _is_stem_or_whole(module: nn.Module) -> bool:
    """Whether blocks are inside it: an encoder with a norm, or a model with an attention pool."""
    return any(
        isinstance(child, nn.ModuleList | nn.Sequential)
        and len(child) > 0
        and any(_ATTENTION.search(name) for part in child for name, _ in part.named_children())
        for child in module.children()
    )


def main_stack(names: Sequence[str]) -> set[str]:
    """The names of the longest stack of blocks; class-attention blocks, which write other tokens, are another.

    >>> sorted(main_stack(["blocks.0", "blocks.1", "readout.blocks.0"]))
    ['blocks.0', 'blocks.1']
    """
    stacks: dict[str, set[str]] = {}
    for name in names:
        stacks.setdefault(re.sub(r"\d+", "#", name), set()).add(name)
    return max(stacks.values(), key=len, default=set())


def branch_of(parameter: str) -> str:
    """The branch, "attn" or "mlp", that a parameter of a foreign block belongs to, by its name in the block.

    >>> branch_of("norm1.weight"), branch_of("norm2.weight"), branch_of("attn.norm.weight")
    ('attn', 'mlp', 'attn')
    """
    return "attn" if _ATTENTION_SIDE.search(parameter) else "mlp"


def branch_parameters(block: nn.Module, branch: str) -> list[tuple[str, nn.Parameter]]:
    """The parameters of one branch of a block with their names; all of them where it has one branch only."""
    if isinstance(block, Block):
        sides: Any = {"attn": (block.attn_join, block.attn), "mlp": (block.mlp_join, block.mlp)}
        return [item for part in sides[branch] for item in part.named_parameters()]
    named = list(block.named_parameters())
    return named if branch == "block" else [item for item in named if branch_of(item[0]) == branch]


def scales_of(block: nn.Module, branch: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The residual scales (LayerScale's gamma, ReZero's alpha) and the norms' weights of a branch."""
    if isinstance(block, Block):
        join = block.attn_join if branch == "attn" else block.mlp_join
        gammas = [
            p for name, p in cast(nn.Module, join.scale).named_parameters() if name in ("gamma", "alpha")
        ]
        norms = [n for n in (join.norm, join.post_norm) if n is not None]
        weights = [getattr(n, name, None) for n in norms for name in ("weight", "a")]
        return gammas, [w for w in weights if w is not None]
    named = branch_parameters(block, branch)
    gammas = [p for name, p in named if _SCALE.search(name)]
    weights = [
        p for name, p in named if _NORM.search(name) and name.endswith(("weight", ".a")) and p.dim() == 1
    ]
    return gammas, weights


_COLOURS = ("red", "green", "blue")
_FILTERS, _MIXERS = 48, 6
"""Filters, and blocks with talking heads, that are taken."""


def residual_scales(model: nn.Module) -> dict[str, dict[str, list[float]]]:
    """LayerScale's gamma or ReZero's alpha by branch and block; without branches whose blocks differ in width."""
    found = {}
    for branch in ("attn", "mlp"):
        rows = {}
        for block, module in find_blocks(model).items():
            gammas, _ = scales_of(module, branch)
            if gammas:
                rows[block] = _numbers(gammas[0]).reshape(-1).tolist()
        if len({len(row) for row in rows.values()}) == 1:
            found[branch] = rows
    return found


def pixel_scales(model: nn.Module) -> list[dict[str, Any]]:
    """The weight of Dual PatchNorm's ln0 by colour and pixel of the patch; empty without ln0."""
    stem = next((m for m in model.modules() if isinstance(m, PatchEmbed) and m.ln0 is not None), None)
    if stem is None or stem.ln0 is None or stem.ln0.weight is None:
        return []
    height, width = sides(stem.patch_size)
    scale = _numbers(stem.ln0.weight).reshape(height, width, stem.in_channels)
    found = []
    for channel in range(stem.in_channels):
        name = _COLOURS[channel] if stem.in_channels == 3 else f"channel {channel}"
        centre, corners = centre_and_corners(scale[..., channel])
        values = scale[..., channel].tolist()
        found.append({"channel": name, "centre": centre, "corners": corners, "scale": values})
    return found


def centre_and_corners(values: np.ndarray) -> tuple[float, float]:
    """Mean |scale| of the middle quarter of the pixels, and of the four corners of one sixteenth each."""
    size = np.abs(values)
    middle = tuple(slice(side // 4, side - side // 4) for side in size.shape)
    ends = [(slice(0, max(side // 4, 1)), slice(side - max(side // 4, 1), side)) for side in size.shape]
    corners = [size[rows, columns].mean() for rows in ends[0] for columns in ends[1]]
    return float(size[middle].mean()), float(np.mean(corners))


def patch_filters(model: nn.Module) -> dict[str, Any] | None:
    """Filters (C, P, P) of the patch projection, largest norm first; None without such a layer."""
    filters = _filters(model)
    if filters is None:
        return None
    order = torch.linalg.vector_norm(filters.flatten(1), dim=1).argsort(descending=True)[:_FILTERS]
    return {"count": len(filters), "order": order.tolist(), "filters": filters[order].tolist()}


def _filters(model: nn.Module) -> Tensor | None:
    """(D, C, P, P) weights of the first layer of patches."""
    for module in model.modules():
        if isinstance(module, PatchEmbed):
            weight = module.proj.weight.detach().cpu().float()
            return weight.unflatten(1, (*sides(module.patch_size), module.in_channels)).permute(0, 3, 1, 2)
        if isinstance(module, nn.Conv2d) and module.stride == module.kernel_size != (1, 1):
            return module.weight.detach().cpu().float()
    return None


def head_mixing(model: nn.Module) -> dict[str, list[list[float]]]:
    """Talking heads' mixing matrices of a few blocks from the first to the last: before the softmax, then after it."""
    found = [
        (name, module)
        for name, block in find_blocks(model).items()
        for module in block.modules()
        if isinstance(module, TalkingHeadsAttention)
        or (hasattr(module, "proj_l") and hasattr(module, "proj_w"))
    ]
    count = min(_MIXERS, len(found))
    chosen = [found[round(i * (len(found) - 1) / max(count - 1, 1))] for i in range(count)]
    return {
        f"{name}.{key}": _numbers(getattr(module, key).weight).tolist()
        for key in ("proj_l", "proj_w")
        for name, module in chosen
    }


def _numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()
