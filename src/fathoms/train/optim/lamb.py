"""LAMB with timm's semantics, in multi-tensor operations, so that hundreds of small parameters cost little."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fathoms.errors import ConfigError
from fathoms.names.optimizers import BETAS, LAMB_EPS
from fathoms.train.optim.closure import loss_of
from fathoms.train.optim.conditional_step import hold_of, zero_
from fathoms.train.optim.plain import PlainOptimizer


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
