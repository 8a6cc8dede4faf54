"""Muon for the matrices inside the blocks and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fathoms.errors import ConfigError
from fathoms.names.optimizers import BETAS, EPS, takes_muon
from fathoms.train.optim.closure import loss_of
from fathoms.train.optim.conditional_step import hold_of, step_unless
from fathoms.train.optim.plain import AdamW, PlainOptimizer
from fathoms.train.optim.stacked_muon import StackedMuon

ALGORITHMS = ("muon", "adamw")


class MuonWithAdamW(PlainOptimizer):
    """Stacked Muon on groups whose "algorithm" is "muon", torch's AdamW on those where it is "adamw".

    Both use this optimizer's groups and state, so that a learning rate set here applies to both, and `state_dict`
    holds everything. Muon's steps are scaled to the size of AdamW's (0.2 sqrt(max side), as in Moonlight), so one
    learning rate and one weight decay serve both.

    Args:
        params: Groups, each with an "algorithm".
        lr: Learning rate.
        momentum: Muon's Nesterov momentum.
        betas: AdamW's decay of the two moments.
        eps: AdamW's term in the denominator.
        fused: Whether AdamW runs as one kernel; None lets torch choose.

    Papers: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
        fused: bool | None = None,
    ) -> None:
        super().__init__(list(params), {"lr": lr, "weight_decay": 0.0, "algorithm": None})
        for group in self.param_groups:
            if group["algorithm"] not in ALGORITHMS:
                raise ConfigError(
                    f"muon: a group's algorithm is {group['algorithm']!r}; use 'muon' or 'adamw'"
                )
        # The inner optimizers get copies of the groups, and fill in their defaults there.
        mine = {
            name: [dict(group) for group in self.param_groups if group["algorithm"] == name]
            for name in ALGORITHMS
        }
        self._parts: dict[str, torch.optim.Optimizer] = {}
        if mine["muon"]:
            self._parts["muon"] = StackedMuon(
                mine["muon"], lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
        if mine["adamw"]:
            self._parts["adamw"] = AdamW(mine["adamw"], lr, betas, eps, fused=fused)
        filled = {name: iter(part.param_groups) for name, part in self._parts.items()}
        self.param_groups = [next(filled[group["algorithm"]]) for group in self.param_groups]
        self._share()
        # torch's name for: the optimizer reads `found_inf`, and does nothing if it is one (see conditional_step.py).
        self._step_supports_amp_scaling = True

    def _share(self) -> None:
        """Point the inner optimizers to this optimizer's groups and state."""
        for name, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both algorithms."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update by each algorithm of its own parameters."""
        loss = loss_of(closure)
        hold = hold_of(self)
        for part in self._parts.values():
            if hold is None:
                part.step()
            else:
                step_unless(part, hold)
        return loss


def _by_muon(group: dict[str, Any]) -> dict[str, Any]:
    """A group of matrices whose learning rate depends on the width, by Muon's rule instead of Adam's.

    A step of 0.2 sqrt(max side) times an orthogonal matrix has a spectral norm that grows with the square root of the
    width, where Adam's grows with the width; the learning rate falls as much, and the weight decay rises.
    """
    root = group.get("width", 1.0) ** 0.5
    return {**group, "lr_scale": group["lr_scale"] * root, "weight_decay": group["weight_decay"] / root}


def split_for_muon(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, each split in two if it has parameters for both algorithms."""
    parts: list[dict[str, Any]] = []
    for group in groups:
        for algorithm in ALGORITHMS:
            pairs = [
                (name, parameter)
                for name, parameter in zip(group["names"], group["params"], strict=True)
                if takes_muon(name, parameter.shape) is (algorithm == "muon")
            ]
            if pairs:
                names, params = map(list, zip(*pairs, strict=True))
                own = _by_muon(group) if algorithm == "muon" else group
                parts.append({**own, "names": names, "params": params, "algorithm": algorithm})
    if not any(part["algorithm"] == "muon" for part in parts):
        raise ConfigError("--opt muon: the model has no matrix inside a block; use adamw")
    return parts
