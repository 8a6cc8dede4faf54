"""In which precision a step is computed, by name, and what is compiled of a model.

| name | matrix products | residual stream | weights |
|---|---|---|---|
| fp32 | float32 | float32 | float32 |
| autocast_fp32_stream | the dtype of --amp-dtype | float32 | float32, cast at every use |
| autocast (`--amp`) | the dtype of --amp-dtype | the same | float32, cast at every use |
| bf16 | bfloat16 | bfloat16 | float32 masters, cast once a step |

Norms, scales and tokens stay float32 under every policy, and statistics are always in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.registry import check_name

KEEPS = ("all", "lean")
PRECISIONS = ("fp32", "autocast_fp32_stream", "autocast", "bf16")


def set_stream(model: nn.Module, precision: str) -> None:
    """Let a model's residual stream have the dtype of a policy."""
    check_name(precision, PRECISIONS, "precision", "train.precision")
    wide = precision == "autocast_fp32_stream"
    if isinstance(model, ViT):
        model.stream_dtype = torch.float32 if wide else None
    elif wide:
        raise ConfigError(
            "train.precision='autocast_fp32_stream' is for fathoms models; use 'autocast', where timm's "
            "models keep a float32 stream anyway"
        )


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
