"""torch.compile of a model or of each of its blocks, and how much it saves for the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from fathoms.errors import ConfigError
from fathoms.names.registry import check_name
from fathoms.train.precision.compile_cache import compile_repeatably, keep_compiled_code

KEEPS = ("all", "lean")
DEFAULT_BACKEND = "inductor"


def check_backend(name: str) -> str:
    """Return the name of a backend of torch.compile; an unknown one is an error."""
    # Listing them imports them all, which takes a second or more.
    if name == DEFAULT_BACKEND:
        return name
    return check_name(name, torch._dynamo.list_backends(None), "backend", "--torchcompile")


def prepare_compiler() -> None:
    """Import torch's compiler, which takes seconds, and set it up for this process: its caches, rules and savings."""
    keep_compiled_code()
    compile_repeatably()
    keep_lean()
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compile every block of a model in place; blocks that differ only in their weights share one compilation."""
    stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    blocks = [part for stack in stacks for part in stack if "Block" in type(part).__name__]
    if not blocks:
        raise ConfigError("--compile-scope blocks: the model has no list of blocks; use model")
    # Blocks that differ in more, such as their drop-path, each need their own compilation, and torch gives up after
    # eight. The limit holds for the process and is only ever raised: blocks are compiled at their first call, long
    # after this returns, and a higher limit changes nothing for other code but when torch would give up.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks) + 8)
    for block in blocks:
        block.compile(**options)


def kept_for_backward(keep: str) -> AbstractContextManager[None]:
    """Set what code compiled in this context saves for the backward pass: "all" that torch would, or "lean".

    "lean" recomputes element-wise results, such as norms and activations, instead of saving them.
    """
    check_name(keep, KEEPS, "amount", "--keep")
    return torch._functorch.config.patch(ban_recompute_materialized_backward=keep == "all")


def keep_lean() -> None:
    """Make everything compiled from now on in this process save little for the backward pass.

    It is a process-wide switch, since a model is compiled at its first call, long after this returns, and again for
    each new shape. `kept_for_backward("all")` takes it back for what is compiled inside.
    """
    torch._functorch.config.ban_recompute_materialized_backward = False
