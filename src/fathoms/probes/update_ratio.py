"""The length of the next update of each parameter, read from the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fathoms.names.optimizers import BETAS, EPS, MUON_STRETCH
from fathoms.probes.tensor_statistics import norm, wide


def update_norms(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The length of the update that the optimizer's state makes of each parameter, weight decay included.

    It is what the moments of AdamW and LAMB, the momentum of SGD, or Muon's scaled orthogonal step say at the group's
    learning rate, before the next gradient is added. None where the state holds nothing of these parameters, as
    before the first step.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = []
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        length = (
            _length(parameter, state, groups[id(parameter)]) if state and id(parameter) in groups else None
        )
        if length is not None:
            found.append(length)
    return found or None


def _length(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor | None:
    lr = float(group["lr"])
    decay = float(group.get("weight_decay", 0.0))
    if "exp_avg_sq" in state:
        step = _adam(state, group) + decay * wide(parameter)
        if "always_adapt" in group and (decay or group["always_adapt"]):
            # LAMB makes the step as long as the weights are.
            return lr * norm(parameter)
        return lr * norm(step)
    if state.get("momentum_buffer") is None:
        return None
    if group.get("algorithm") == "muon":
        # An orthogonal matrix times the stretch and sqrt(longer side): its length needs no orthogonalisation.
        return torch.full((), lr * MUON_STRETCH * parameter.numel() ** 0.5, dtype=torch.float64).to(
            parameter.device
        )
    return lr * norm(wide(state["momentum_buffer"]) + decay * wide(parameter))


def _adam(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Adam's step at a learning rate of one."""
    count = torch.as_tensor(state.get("step", group.get("step", 1)), dtype=torch.float64).clamp(min=1)
    first, second = (
        1 - torch.tensor(beta, dtype=torch.float64) ** count.cpu() for beta in group.get("betas", BETAS)
    )
    size = (wide(state["exp_avg_sq"]) / float(second)).sqrt() + group.get("eps", EPS)
    return wide(state["exp_avg"]) / float(first) / size
