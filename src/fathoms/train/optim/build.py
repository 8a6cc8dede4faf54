"""Build optimizers by name, on parameter groups that keep the names of their parameters."""

from __future__ import annotations

from typing import Any

import torch

from fathoms.errors import ConfigError
from fathoms.models.param_groups import ParamGroups
from fathoms.names.optimizers import BETAS, EPS, LAMB_EPS, WITH_BETAS
from fathoms.names.registry import Registry
from fathoms.train.optim.lamb import Lamb
from fathoms.train.optim.muon import MuonWithAdamW, split_for_muon
from fathoms.train.optim.plain import SGD, AdamW

OPTIMIZERS: Registry[torch.optim.Optimizer, None] = Registry("optimizer")

Groups = list[dict[str, Any]]


def build_optimizer(
    groups: ParamGroups,
    name: str,
    *,
    lr: float,
    momentum: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer called `name` on `groups`, each of which keeps its "names" and its "lr_scale".

    Each group has its own weight decay, and its own epsilon: that of the optimizer times the group's "eps_scale".
    `None` is the optimizer's own default; an option that it does not take is refused. The given groups are not changed.

    Args:
        groups: From `fathoms.param_groups`.
        name: A name in OPTIMIZERS.
        lr: Learning rate before the groups' scales.
        momentum: For sgd and momentum (0.9) and muon (0.95).
        betas: For lamb, adamw and muon's AdamW (0.9, 0.999).
        eps: For lamb (1e-6), adamw and muon's AdamW (1e-8).
        fused: For adamw and muon's AdamW; None fuses where all parameters are on a CUDA device.

    >>> from fathoms import create_model, param_groups
    >>> groups = param_groups(create_model("vit_tiny_patch16_224"), weight_decay=0.02, layer_decay=0.5)
    >>> optimizer = build_optimizer(groups, "lamb", lr=0.005)
    >>> set_lr(optimizer, 0.001)
    >>> max(group["lr"] for group in optimizer.param_groups)
    0.001
    """
    OPTIMIZERS.check(name, "--opt")
    if not groups:
        raise ConfigError("--freeze: no parameter is left to train; leave some unfrozen")
    _check_transfer(groups, name)
    kept = ("params", "names", "lr_scale", "weight_decay")
    scales = ("eps_scale", "width")
    copies = [
        {key: group[key] for key in kept} | {key: group.get(key, 1.0) for key in scales} for group in groups
    ]
    optimizer = OPTIMIZERS.build(name, copies, lr, momentum=momentum, betas=betas, eps=eps, fused=fused)
    for group in optimizer.param_groups:
        # Muon's own epsilon only guards a division by zero.
        if "eps" in group and group.get("algorithm") != "muon":
            group["eps"] *= group["eps_scale"]
    set_lr(optimizer, lr)
    return optimizer


def _check_transfer(groups: ParamGroups, name: str) -> None:
    """Refuse an optimizer that the rules of transfer over depth and width were not made for."""
    if name == "lamb" and any(group.get("width", 1.0) != 1.0 for group in groups):
        raise ConfigError(
            "--opt lamb: its steps are in proportion to the weights, for which base_dim has no rule; "
            "use adamw or muon, or leave --base-dim out"
        )
    if name not in WITH_BETAS and any(group.get("eps_scale", 1.0) != 1.0 for group in groups):
        raise ConfigError(
            f"--opt {name}: its steps are in proportion to the gradients, and the rules of completep and depth_mup are "
            "for steps that are not; use adamw, muon or lamb"
        )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to `lr` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _all_on_cuda(groups: Groups) -> bool:
    return all(parameter.is_cuda for group in groups for parameter in group["params"])


@OPTIMIZERS.add("lamb")
def lamb(
    groups: Groups, lr: float, betas: tuple[float, float] = BETAS, eps: float = LAMB_EPS
) -> torch.optim.Optimizer:
    """LAMB as in timm: Adam with updates in proportion to the norm of each matrix, the gradient clipped to norm 1."""
    return Lamb(groups, lr=lr, betas=betas, eps=eps)


@OPTIMIZERS.add("adamw")
def adamw(
    groups: Groups,
    lr: float,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, torch's; fused on CUDA."""
    fused = _all_on_cuda(groups) or None if fused is None else fused
    return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


@OPTIMIZERS.add("muon")
def muon(
    groups: Groups,
    lr: float,
    momentum: float = 0.95,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """Orthogonalised momentum for the matrices inside blocks, torch's AdamW for the rest."""
    fused = _all_on_cuda(groups) or None if fused is None else fused
    parts = split_for_muon(groups)
    return MuonWithAdamW(parts, lr=lr, momentum=momentum, betas=betas, eps=eps, fused=fused)


@OPTIMIZERS.add("sgd")
def sgd(groups: Groups, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    """Stochastic gradient descent with Nesterov momentum, as timm's `sgd`."""
    if not momentum > 0:
        raise ConfigError(
            f"--momentum {momentum}: sgd uses Nesterov momentum; raise it or use --opt momentum"
        )
    return SGD(groups, lr=lr, momentum=momentum, nesterov=True)


@OPTIMIZERS.add("momentum")
def heavy_ball(groups: Groups, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    """Stochastic gradient descent with classical momentum; zero is plain descent."""
    return SGD(groups, lr=lr, momentum=momentum)
