"""torch.compile of a model or of each of its blocks, and how much it saves for the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from fathoms.errors import ConfigError
from fathoms.registry import check_name

KEEPS = ("all", "lean")


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compile every block of a model in place: one compilation serves all that differ in weights only."""
    stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    blocks = [part for stack in stacks for part in stack if "Block" in type(part).__name__]
    if not blocks:
        raise ConfigError("compile_scope 'blocks': the model has no list of blocks; use 'model'")
    # Blocks that differ in more, such as their drop-path, each need their own; torch would give up after eight.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks) + 8)
    for block in blocks:
        block.compile(**options)


def kept_for_backward(keep: str) -> AbstractContextManager[None]:
    """What is compiled inside keeps all that torch would, or with "lean" nothing that is cheap to make again."""
    check_name(keep, KEEPS, "amount", "keep")
    return torch._functorch.config.patch(ban_recompute_materialized_backward=keep == "all")


def keep_lean() -> None:
    """Let all that is compiled from now on keep little: a model is compiled at its first call, which is far away."""
    torch._functorch.config.ban_recompute_materialized_backward = False
