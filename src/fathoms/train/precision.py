"""In which precision a step is computed: a policy by name, and bfloat16 copies of the matrices it works with.

| name | matrix products | residual stream | weights |
|---|---|---|---|
| fp32 | float32 | float32 | float32 |
| autocast_fp32_stream | the dtype of --amp-dtype | float32 | float32, cast at every use |
| autocast (`--amp`) | the dtype of --amp-dtype | the same | float32, cast at every use |
| bf16 | bfloat16 | bfloat16 | float32 masters, cast once a step |

Norms, scales and tokens stay float32 under every policy, and statistics are always in float32.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.registry import check_name

KEEPS = ("all", "lean")
PRECISIONS = ("fp32", "autocast_fp32_stream", "autocast", "bf16")


def set_stream(model: nn.Module, precision: str) -> None:
    """Let a model's residual stream have the dtype of a policy."""
    check_name(precision, PRECISIONS, "precision", "train.precision")
    if precision == "autocast_fp32_stream":
        if not isinstance(model, ViT):
            raise ConfigError(
                "train.precision='autocast_fp32_stream' is for fathoms models; use 'autocast', where timm's "
                "models keep a float32 stream anyway"
            )
        model.stream_dtype = torch.float32


class WorkingCopy:
    """A copy of `model` whose linears and convolutions hold bfloat16 copies of the model's own.

    All other parameters and all buffers are the model's own tensors. Train `module`; before the optimizer
    steps on the model's parameters, the masters, call `pull_gradients`, and after it `push_weights`. Nothing
    of this is state: the copies follow from the masters.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> copies = WorkingCopy(model)
    >>> copies.module[0].weight.dtype, copies.module[1].weight is model[1].weight
    (torch.bfloat16, True)
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        wide = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {id(tensor): tensor for tensor in wide}
        self.masters: list[Tensor] = list(_matrices(model).values())
        self.copies: list[Tensor] = []
        for master in self.masters:
            narrow = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
            self.copies.append(narrow)
            memo[id(master)] = narrow
        self.module = copy.deepcopy(model, memo)

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """Add the copies' gradients to the masters', in float32, and forget them."""
        given = [(m, c.grad) for m, c in zip(self.masters, self.copies, strict=True) if c.grad is not None]
        fresh = [(master, grad) for master, grad in given if master.grad is None]
        old = [(master.grad, grad) for master, grad in given if master.grad is not None]
        if fresh:
            wide = [torch.empty_like(master) for master, _ in fresh]
            torch._foreach_copy_(wide, [grad for _, grad in fresh])
            for (master, _), grad in zip(fresh, wide, strict=True):
                master.grad = grad
        if old:
            torch._foreach_add_([grad for grad, _ in old], [grad.to(own.dtype) for own, grad in old])
        for narrow in self.copies:
            narrow.grad = None

    @torch.no_grad()
    def push_weights(self) -> None:
        """Cast the masters into the copies: one pass over the weights."""
        torch._foreach_copy_(self.copies, self.masters)


def _matrices(model: nn.Module) -> dict[int, nn.Parameter]:
    """Weights and biases of linears and convolutions, each once."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            own: list[Tensor | None] = [module.weight, module.bias]
            found |= {id(p): p for p in own if isinstance(p, nn.Parameter) and p.dtype == torch.float32}
    return found


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
    """What is compiled inside keeps all that torch would, or with "lean" nothing that is cheap to make again.

    Lean blocks keep 10 tensors of the stream's size instead of 16, and write those six again in the backward pass.
    """
    check_name(keep, KEEPS, "amount", "keep")
    return torch._functorch.config.patch(ban_recompute_materialized_backward=keep == "all")
