"""The bfloat16 compute model of float32 master weights, cast once per update, its blocks without per-channel work."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.parts.linear import is_bare, is_exact_gelu
from fathoms.parts.mlp import BiasedGelu, GeluMLP
from fathoms.train.precision.absorb_affine import Absorbing, Stack, take_factors
from fathoms.train.precision.gradients import add_gradients


class ComputeCopy:
    """A compute model: a copy of `model` whose linears and convolutions hold bfloat16 copies of its weights.

    In its blocks the gain and shift of norms and the residual scales are part of those matrices (see
    `absorb_affine`), and GELUs add the bias of the linear before them. All other parameters and all buffers are the
    model's own tensors. Run `module` forward and backward; call `pull_gradients` before the optimizer updates the
    model's parameters, the master weights, and `push_weights` after it. None of this is state: the copies follow
    from the master weights.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> copies = ComputeCopy(model)
    >>> copies.module[0].weight.dtype, copies.module[1].weight is model[1].weight
    (torch.bfloat16, True)
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        self.module = copy.deepcopy(model, shared)
        kinds: dict[object, list[Absorbing]] = defaultdict(list)
        for absorbing in take_factors(self.module):
            kinds[absorbing.kind].append(absorbing)
        self.stacks = [Stack(alike, dtype) for alike in kinds.values()]
        self.masters: list[Tensor] = []
        self.copies: list[Tensor] = []
        done = {linear for stack in self.stacks for linear in stack.linears}
        self._copy([part for part in self.module.modules() if part not in done], dtype)
        _move_biases(self.module)
        self.push_weights()

    def _copy(self, parts: list[nn.Module], dtype: torch.dtype) -> None:
        """Replace the float32 weights and biases of linears and convolutions by copies."""
        made: dict[int, nn.Parameter] = {}
        for part in parts:
            if not isinstance(part, nn.Linear | nn.modules.conv._ConvNd):
                continue
            for name, own in part.named_parameters(recurse=False):
                if own.dtype != torch.float32:
                    continue
                if id(own) not in made:
                    made[id(own)] = nn.Parameter(own.detach().to(dtype), requires_grad=own.requires_grad)
                    self.masters.append(own)
                    self.copies.append(made[id(own)])
                part.register_parameter(name, made[id(own)])

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """Move the gradients of the copies to the master weights, in float32."""
        given = [(m, c.grad) for m, c in zip(self.masters, self.copies, strict=True) if c.grad is not None]
        wide = [torch.empty_like(master) for master, _ in given]
        if given:
            torch._foreach_copy_(wide, [grad for _, grad in given])
        add_gradients(zip([master for master, _ in given], wide, strict=True))
        for low in self.copies:
            low.grad = None
        for stack in self.stacks:
            add_gradients(stack.gradients())

    @torch.no_grad()
    def push_weights(self) -> None:
        """Cast the master weights into the copies, in one pass."""
        if self.copies:
            torch._foreach_copy_(self.copies, self.masters)
        for stack in self.stacks:
            stack.push()


def _move_biases(module: nn.Module) -> None:
    """Let GELUs add the bias of the linear before them, except for a linear that several MLPs share."""
    mlps = [part for part in module.modules() if isinstance(part, GeluMLP)]
    uses = Counter(mlp.fc1 for mlp in mlps)
    for mlp in mlps:
        if uses[mlp.fc1] == 1 and is_bare(mlp.fc1) and is_exact_gelu(mlp.act):
            mlp.act = BiasedGelu(mlp.fc1.bias)
            mlp.fc1.register_parameter("bias", None)
