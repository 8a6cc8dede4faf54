"""Skip an optimizer step by a flag on the device, without a host-device sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.train.distributed import own_part

# A group's own counter, which is as much part of the state as the moments are.
COUNTER = "step"
# Integers of the same width: adding and subtracting them is exact in every bit, NaN or not.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def put_back_(tensors: Sequence[Tensor], before: Sequence[Tensor], hold: Tensor) -> None:
    """Restore `tensors` to `before`, bit for bit, if `hold` is one; leave them if it is zero.

    x += hold * (before - x) on the bits read as integers: no branch, and NaN times zero is zero.
    """
    if not tensors:
        return
    now, then = _bits(tensors), _bits(before)
    difference = torch._foreach_sub(then, now)
    torch._foreach_mul_(difference, hold.to(torch.int32))
    torch._foreach_add_(now, difference)


def zero_(tensors: Sequence[Tensor], hold: Tensor) -> None:
    """Set `tensors` to zero if `hold` is one, also from NaN; leave them if it is zero."""
    if tensors:
        torch._foreach_mul_(_bits(tensors), (1 - hold).to(torch.int32))


def _bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    local = map(own_part, tensors)
    return [tensor.detach().view(_BITS[tensor.element_size()]) for tensor in local]


def hold_of(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The flag that skips an optimizer step if it is one, or None; for optimizers that read `found_inf`.

    torch's GradScaler sets it too, and may then pass gradients that are still scaled, which is refused.
    """
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError("optimizer: the gradients are scaled; call the scaler's unscale_ before its step")
    return getattr(optimizer, "found_inf", None)


def step_unless(optimizer: torch.optim.Optimizer, hold: Tensor) -> None:
    """Take an optimizer step unless `hold` is one, without reading `hold` on the host.

    Optimizers that read `found_inf`, as torch's fused ones and ours do, skip by themselves. The others step, and
    parameters and moments are then restored; moments that the optimizer created become zero.
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
    """The tensors that an optimizer step changes: parameters with a gradient, and their moments."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    states = [value for p in params for value in optimizer.state.get(p, {}).values()]
    return [*params, *(value for value in states if isinstance(value, Tensor))]


class ConditionalStep:
    """Makes an update conditional: parameters, moments, counters, and the statistics of BatchNorm.

    On a CPU the flag is read at once, and the optimizer step is simply not taken.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._before: list[Tensor] | None = None
        self._stepped = False

    def begin(self) -> None:
        """Call before the first forward pass of an update, which may change statistics."""
        self._before = [buffer.clone() for buffer in self.buffers]

    def step(self, hold: Tensor) -> None:
        """Take the optimizer step unless `hold` is one."""
        self._stepped = hold.device.type != "cpu"
        if self._stepped:
            step_unless(self.optimizer, hold)
        elif not bool(hold):
            self.optimizer.step()
        if self._before is not None:
            put_back_(self.buffers, self._before, hold)
        self._before = None

    def settled_statistics(self) -> dict[Tensor, Tensor]:
        """By buffer, the statistics after the last step, where forward passes of the next one have moved them on."""
        return {} if self._before is None else dict(zip(self.buffers, self._before, strict=True))

    def abandon(self) -> None:
        """Undo what the forward passes of an update without a step have done to the statistics."""
        for buffer, before in self.settled_statistics().items():
            buffer.copy_(before)
        self._before = None

    def settle(self, held: bool) -> None:
        """Once the host knows the flag: undo the counters that are kept on the host."""
        if held and self._stepped:
            for group in self.optimizer.param_groups:
                if COUNTER in group:
                    group[COUNTER] -= 1
