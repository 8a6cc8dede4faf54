"""Find the norms of a model: their kind, channel axis and depth, and the choice among them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fathoms.errors import FathomsError
from fathoms.names.registry import hint
from fathoms.parts.norms.dyt import Derf, DyT
from fathoms.parts.norms.norm import ScaleNorm
from fathoms.parts.norms.scaler import LearnableScaler, LearnableScaler2d

Layout = Literal["last", "first"]


@dataclass(frozen=True)
class NormSite:
    """One norm of a model.

    Args:
        name: Its path in the model.
        module: The module there.
        kind: Its name in the norm registry, or "batchnorm" or "groupnorm".
        dim: Number of channels.
        layout: Whether the channels are the last axis or the second.
        depth: Index of its block among the blocks that hold a norm; None outside of blocks.
    """

    name: str
    module: nn.Module
    kind: str
    dim: int
    layout: Layout
    depth: int | None


_KINDS = {
    "learnable_scaler": LearnableScaler,
    "dyt": DyT,
    "derf": Derf,
    "scalenorm": ScaleNorm,
    "layernorm": nn.LayerNorm,
    "rmsnorm": nn.RMSNorm,
    "batchnorm": nn.modules.batchnorm._BatchNorm,
    "groupnorm": nn.GroupNorm,
}

Choice = str | Sequence[str] | range | Callable[[NormSite], bool]


def kind_of(module: nn.Module) -> str | None:
    """The kind of norm a module is, or None; other libraries' own norms are recognised by class name."""
    for kind, cls in _KINDS.items():
        if isinstance(module, cls):
            return kind
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    if re.search(r"rms_?norm", name, re.IGNORECASE) and weight is not None and weight.ndim == 1:
        return "rmsnorm"
    return None


def layout_of(module: nn.Module) -> Layout:
    """The channel axis: second in maps (B, C, H, W), last in tokens."""
    if isinstance(module, LearnableScaler2d | nn.GroupNorm | nn.modules.batchnorm._BatchNorm):
        return "first"
    if getattr(module, "data_format", None) == "channels_first" or "2d" in type(module).__name__:
        return "first"
    return "last"


def width_of(module: nn.Module, name: str) -> int:
    """Number of channels of a norm."""
    shape = getattr(module, "normalized_shape", None)
    if shape is not None and not isinstance(shape, int) and len(shape) != 1:
        raise FathomsError(
            f"{name}: a LayerNorm over {len(shape)} axes {tuple(shape)} has no channel axis to keep; "
            "leave it out with only="
        )
    for attribute in ("num_features", "num_channels", "dim"):
        size = getattr(module, attribute, None)
        if isinstance(size, int):
            return size
    if shape is not None:
        return shape if isinstance(shape, int) else int(shape[0])
    return int(module.weight.shape[0])  # pyrefly: ignore


def _block_of(name: str) -> str | None:
    """The path up to the last numbered container, such as "layers.0.blocks.1" of "layers.0.blocks.1.norm2"."""
    pieces = name.split(".")
    numbered = [
        i for i, piece in enumerate(pieces) if piece.isdigit() or re.fullmatch(r".*layer_?\d+", piece)
    ]
    return ".".join(pieces[: numbered[-1] + 1]) if numbered else None


def find_sites(model: nn.Module) -> list[NormSite]:
    """Every norm of a model, in the order of its modules; a norm that is shared is one site."""
    found = [(name, module) for name, module in model.named_modules() if kind_of(module) is not None]
    blocks: dict[str, int] = {}
    sites = []
    for name, module in found:
        block = _block_of(name)
        depth = None if block is None else blocks.setdefault(block, len(blocks))
        kind = kind_of(module) or ""
        sites.append(NormSite(name, module, kind, width_of(module, name), layout_of(module), depth))
    return sites


def _by_pattern(sites: list[NormSite], patterns: Iterable[str]) -> list[NormSite]:
    names = [site.name for site in sites]
    chosen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise FathomsError(f"swap_norms: only={pattern!r} matches no norm; {hint(pattern, names)}")
        chosen.update(matched)
    return [site for site in sites if site.name in chosen]


def choose_sites(sites: list[NormSite], only: Choice | None) -> list[NormSite]:
    """The sites that `only` picks: all for None; a choice that picks nothing is an error.

    Args:
        sites: The candidates; not empty.
        only: Shell patterns over names, a range of depths, or a function of a site.
    """
    if only is None:
        return sites
    if isinstance(only, str):
        return _by_pattern(sites, [only])
    if isinstance(only, range):
        depths = sorted({site.depth for site in sites if site.depth is not None})
        chosen = [site for site in sites if site.depth in only]
        problem = f"only={only} holds no norm; the blocks with norms are {depths[:1]} to {depths[-1:]}"
    elif callable(only):
        chosen = [site for site in sites if only(site)]
        problem = f"the function given as only= picks none of {len(sites)} norms"
    else:
        chosen = _by_pattern(sites, only)
        problem = f"only={only!r} names none of {len(sites)} norms"
    if not chosen:
        raise FathomsError(f"swap_norms: {problem}; see fathoms.surgery.swap.sites.find_sites(model)")
    return chosen
