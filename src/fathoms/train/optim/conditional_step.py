"""An optimizer's step that a flag on the device holds back, so that nobody waits for the device to look at it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fathoms.errors import ConfigError

# A group's own counter, which is as much part of the state as the moments are.
COUNTER = "step"
# Whole numbers of the same width: adding and subtracting them gives back every bit, NaN or not.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def put_back_(tensors: Sequence[Tensor], before: Sequence[Tensor], hold: Tensor) -> None:
    """Where `hold` is one make `tensors` what they were, bit for bit; where it is zero leave them.

    x += hold * (before - x) on the bits read as whole numbers: no branch, and NaN times zero is zero.
    """
    if not tensors:
        return
    now, then = _bits(tensors), _bits(before)
    difference = torch._foreach_sub(then, now)
    torch._foreach_mul_(difference, hold.to(torch.int32))
    torch._foreach_add_(now, difference)


def zero_(tensors: Sequence[Tensor], hold: Tensor) -> None:
    """Where `hold` is one make `tensors` zero, whatever they hold; where it is zero leave them."""
    if tensors:
        torch._foreach_mul_(_bits(tensors), (1 - hold).to(torch.int32))


def _bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [tensor.detach().view(_BITS[tensor.element_size()]) for tensor in local]


def hold_of(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The flag that holds a step back where it is one, None if there is none; for optimizers that know `found_inf`.

    With it torch's GradScaler may hand over gradients that are still scaled. These optimizers do not take them.
    """
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError("optimizer: the gradients are scaled; call the scaler's unscale_ before its step")
    return getattr(optimizer, "found_inf", None)


def step_unless(optimizer: torch.optim.Optimizer, hold: Tensor) -> None:
    """Take the step, or none where `hold` is one, without asking the device which of the two it is.

    Optimizers that know `found_inf`, as torch's fused ones and ours do, hold back by themselves. The others
    step, and parameters and moments are then put back; moments that the step made become zero.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, hold  # pyrefly: ignore[missing-attribute]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # pyrefly: ignore[missing-attribute]
        return
    before = {tensor: tensor.detach().clone() for tensor in _moved(optimizer)}
    optimizer.step()
    after = _moved(optimizer)
    put_back_(
        after, [before[t] if t in before else torch.zeros_like(t, requires_grad=False) for t in after], hold
    )


def _moved(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What a step changes: the parameters that have a gradient, and their moments."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    states = [value for p in params for value in optimizer.state.get(p, {}).values()]
    return [*params, *(value for value in states if isinstance(value, Tensor))]


class Gate:
    """Guards everything that one update changes: parameters, moments, counters, and a BatchNorm's statistics.

    A CPU answers at once, so there the step is simply not taken.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._before: list[Tensor] = []
        self._stepped = False

    def open(self) -> None:
        """Before the first forward pass of an update, which may change statistics."""
        self._before = [buffer.clone() for buffer in self.buffers]

    def step(self, hold: Tensor) -> None:
        """Take the step unless `hold` is one."""
        self._stepped = hold.device.type != "cpu"
        if self._stepped:
            step_unless(self.optimizer, hold)
        elif not bool(hold):
            self.optimizer.step()
        put_back_(self.buffers, self._before, hold)

    def settle(self, held: bool) -> None:
        """Once the host knows what the flag was: take back the counters that are kept there."""
        if held and self._stepped:
            for group in self.optimizer.param_groups:
                if COUNTER in group:
                    group[COUNTER] -= 1
