"""Optimizers by name, on parameter groups that keep the names of their parameters, and learning rate schedules.

A schedule is a pure function of the epoch, so that a resumed run needs no state for it. A registered shape gives the
share of the base rate at epoch e of E; `Schedule` adds the minimum, the warm-up, the cool-down, and whether the rate
changes within an epoch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fathoms.errors import ConfigError
from fathoms.models.param_groups import ParamGroups
from fathoms.optimizer_facts import BETAS, EPS, LAMB_EPS, WITH_BETAS
from fathoms.registry import Registry
from fathoms.training.muon import MuonWithAdamW, split_for_muon
from fathoms.training.optimizer_step import SGD, AdamW, Lamb
from fathoms.training.recipe import ENDING, Recipe

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
        if "eps" in group:
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
    groups: Groups, lr: float, betas: tuple[float, float] = BETAS, eps: float = EPS, fused: bool | None = None
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


Epochs = int | float


SCHEDULES: Registry[float, None] = Registry("schedule")
# From this share of the epochs on, LearnableScaler's schedule is the plain cosine again.
CUSTOM_REJOINS = 0.66


def half_cosine(epoch: Epochs, epochs: Epochs) -> float:
    """Half a cosine, (1 + cos(pi e / E)) / 2, from one to zero."""
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


@SCHEDULES.add("cosine")
def cosine(epoch: Epochs, epochs: Epochs) -> float:
    """Half a cosine from the base rate to the minimum.

    Paper: Loshchilov and Hutter 2016, arXiv:1608.03983.
    """
    return half_cosine(epoch, epochs)


@SCHEDULES.add("step")
def step(epoch: Epochs, decay_epochs: Epochs = 90, decay_rate: float = 0.1) -> float:
    """Multiply by `decay_rate` after every `decay_epochs` epochs."""
    return decay_rate ** (epoch // decay_epochs)


@SCHEDULES.add("wsd")
def wsd(epoch: Epochs, epochs: Epochs, decay_epochs: Epochs | None = None) -> float:
    """Warm-up, stable, decay: the base rate, then 1 - sqrt(share done) over the last `decay_epochs`.

    `decay_epochs` is a fifth of the epochs unless given.

    Paper: Hägele et al. 2024, arXiv:2405.18392.
    """
    length = 0.2 * epochs if decay_epochs is None else min(decay_epochs, epochs)
    done = epoch - (epochs - length)
    return 1.0 if done <= 0 else 1 - math.sqrt(done / length)


@SCHEDULES.add("custom")
def custom(epoch: Epochs, epochs: Epochs, epoch_factor: float = 0.8, epoch_threshold: float = 0.5) -> float:
    """LearnableScaler's schedule: a lowered cosine, a straight line that rejoins the cosine, then the cosine.

    With c the cosine, n = threshold * E and m = int(0.66 E): factor * c(e) before n, from n to m the line
    from factor * c(n) to c(m), and c(e) from m on.
    """
    leaves, rejoins = epoch_threshold * epochs, int(CUSTOM_REJOINS * epochs)
    if epoch < leaves:
        return epoch_factor * half_cosine(epoch, epochs)
    if epoch < rejoins:
        low, high = epoch_factor * half_cosine(leaves, epochs), half_cosine(rejoins, epochs)
        return low + (high - low) * (epoch - leaves) / (rejoins - leaves)
    return half_cosine(epoch, epochs)


@SCHEDULES.add("constant")
def constant(epoch: Epochs) -> float:
    """The base rate throughout."""
    del epoch
    return 1.0


class Schedule:
    """Learning rate of a run: `lr(epoch)`, from the options of a recipe.

    The warm-up is a straight line from `warmup_lr` to the base rate over the first epochs of the shape; with
    `warmup_prefix` it comes before the shape. A shape that ends (cosine, wsd, custom) runs from the base rate
    to `min_lr` and stays there for `cooldown_epochs` more; for "step" `min_lr` is a floor.

    >>> schedule = Schedule(Recipe(lr=0.001, epochs=10, warmup_epochs=2, warmup_lr=0.0))
    >>> [round(schedule.lr(epoch), 6) for epoch in (0, 1, 2, 5, 10)]
    [0.0, 0.0005, 0.000905, 0.0005, 0.0]
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._ends = recipe.sched in ENDING
        names = ("decay_epochs", "decay_rate", "epoch_factor", "epoch_threshold")
        self._options: dict[str, Any] = {name: getattr(recipe, name) for name in names}

    def notices(self) -> list[str]:
        """A line where the warm-up outlasts the run."""
        recipe = self.recipe
        if recipe.warmup_prefix or recipe.warmup_epochs <= recipe.total_epochs:
            return []
        return [
            f"--warmup-epochs {recipe.warmup_epochs:g}: the warm-up is longer than the run of {recipe.total_epochs} "
            f"epochs, so that the rate never reaches --lr {recipe.lr:g}"
        ]

    def lr(self, epoch: Epochs) -> float:
        """The learning rate at `epoch`, which may be fractional: updates done over updates per epoch."""
        recipe = self.recipe
        if not recipe.sched_on_updates:
            epoch = math.floor(epoch)
        if epoch < recipe.warmup_epochs:
            return recipe.warmup_lr + epoch * (recipe.lr - recipe.warmup_lr) / recipe.warmup_epochs
        if recipe.warmup_prefix:
            epoch -= recipe.warmup_epochs
        if self._ends and epoch >= recipe.epochs:
            return recipe.min_lr
        epochs = recipe.epochs if self._ends else None
        share: float = SCHEDULES.build(recipe.sched, epoch, epochs=epochs, **self._options)
        if self._ends:
            return recipe.min_lr + (recipe.lr - recipe.min_lr) * share
        return max(recipe.min_lr, recipe.lr * share)
