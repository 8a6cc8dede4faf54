"""Optimizer steps that a flag on the device can skip: torch's AdamW and SGD, and LAMB."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fathoms.errors import ConfigError
from fathoms.optimizer_facts import BETAS, LAMB_EPS
from fathoms.training.distributed import own_part


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that a closure returns, called with gradients enabled as in torch's optimizers; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class PlainOptimizer(torch.optim.Optimizer):
    """The base of all optimizers of this library: torch's, its methods without their decorators."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


_adamw_step = inspect.unwrap(torch.optim.AdamW.step)
_sgd_step = inspect.unwrap(torch.optim.SGD.step)


class AdamW(PlainOptimizer, torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _adamw_step(self, closure)


class SGD(PlainOptimizer, torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _sgd_step(self, closure)


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


class Lamb(PlainOptimizer):
    """LAMB: Adam whose step on each matrix W has the length lr * |W|.

    With m, v Adam's moments of the clipped gradient and u = m^ / (sqrt v^ + eps) + weight_decay * W:
    W -= lr * (|W| / |u|) * u. The weight decay is inside u, so it is coupled with the length. If it is zero
    (biases, norms, tokens) the step keeps Adam's length, unless `always_adapt` is set; a ratio with a zero in it
    counts as one. As in timm, the gradient of all parameters together is first clipped to norm `max_grad_norm`, in
    place, and each group counts its own calls.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        weight_decay: Coupled weight decay.
        max_grad_norm: Clip the norm of the whole gradient to this; None does not.
        always_adapt: Whether parameters without weight decay use the ratio too.

    Paper: You et al. 2019, arXiv:1904.00962.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = BETAS,
        eps: float = LAMB_EPS,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = 1.0,
        always_adapt: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"lamb: lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}; none may be negative, "
                "and both betas must be below 1"
            )
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "always_adapt": always_adapt,
            "step": 0,
        }
        super().__init__(params, defaults)
        # torch's name for: the optimizer reads `found_inf`, and does nothing if it is one (see conditional_step.py).
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip the gradients, then update every parameter that has one."""
        loss = loss_of(closure)
        hold = hold_of(self)
        if hold is not None:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            zero_(grads, hold)
        self._clip()
        for group in self.param_groups:
            group["step"] += 1
            pairs = [
                (parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None
            ]
            if pairs:
                params, grads = map(list, zip(*pairs, strict=True))
                self._move(group, params, grads, hold)
        return loss

    def _clip(self) -> None:
        """Divide all gradients by their common norm over `max_grad_norm`, if that is above one."""
        every = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        grads = [grad for grad in every if grad is not None]
        # The clip is common to all groups, so it is the optimizer's setting and not a group's.
        limit = self.defaults["max_grad_norm"]
        if limit is None or not grads:
            return
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_div_(grads, (norm / limit).clamp_(min=1.0))

    def _move(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], hold: Tensor | None
    ) -> None:
        for parameter in params:
            if not self.state[parameter]:
                for moment in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter][moment] = torch.zeros_like(parameter)
        first = [self.state[parameter]["exp_avg"] for parameter in params]
        second = [self.state[parameter]["exp_avg_sq"] for parameter in params]
        beta1, beta2 = group["betas"]
        # In a skipped update the gradients are zero, and the moments are not decayed.
        torch._foreach_mul_(first, beta1 if hold is None else torch.where(hold > 0, 1.0, beta1))
        torch._foreach_add_(first, grads, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2 if hold is None else torch.where(hold > 0, 1.0, beta2))
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)

        spread = torch._foreach_sqrt(second)
        torch._foreach_div_(spread, (1 - beta2 ** group["step"]) ** 0.5)
        torch._foreach_add_(spread, group["eps"])
        update = torch._foreach_div(first, 1 - beta1 ** group["step"])
        torch._foreach_div_(update, spread)
        if group["weight_decay"] != 0:
            torch._foreach_add_(update, params, alpha=group["weight_decay"])
        if group["weight_decay"] != 0 or group["always_adapt"]:
            torch._foreach_mul_(update, _trust_ratios(params, update))
        if hold is not None:
            torch._foreach_mul_(update, 1 - hold)
        torch._foreach_add_(params, update, alpha=-group["lr"])


def _trust_ratios(params: list[Tensor], update: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    """Trust ratio |W| / |u| of each parameter, one if either is zero; all on the device, in a few kernels."""
    weight = torch.stack(torch._foreach_norm(params))
    length = torch.stack(torch._foreach_norm(update))
    ratio = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
    return list(ratio.unbind())
