"""The blocks of any Vision Transformer, found by the names of their children."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from fathoms.errors import ConfigError
from fathoms.parts.block import Block

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
