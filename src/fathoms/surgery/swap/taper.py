"""Swap norms gradually while a model is fine-tuned: each norm fades into its successor over many steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.surgery.replace import replace_module
from fathoms.surgery.report import SwapReport
from fathoms.surgery.swap.sites import Choice
from fathoms.surgery.swap.swap import swap_norms


class Tapered(nn.Module):
    """A norm on its way out: y = (1 - t) old(x) + t new(x).

    `t` is a buffer, so that it is saved with the model, and a compiled model sees it change.
    """

    t: Tensor

    def __init__(self, old: nn.Module, new: nn.Module) -> None:
        super().__init__()
        self.old, self.new = old, new
        tensor = next(iter((*new.parameters(), *old.parameters())), torch.zeros(()))
        self.register_buffer("t", torch.zeros((), device=tensor.device))

    def forward(self, x: Tensor) -> Tensor:
        """Mix what both make of x."""
        return torch.lerp(self.old(x).float(), self.new(x).float(), self.t.float()).to(x.dtype)


class Taper:
    """The norms of a model that fade into others, moved on by `step` once per training step.

    After the last step only the new norms are left in the model, under the names of the old ones. Give
    the optimiser the model's parameters after this is made: the new parts' are among them.

    Args:
        report: What will have been swapped.
        steps: How many calls of `step` it takes.
    """

    def __init__(self, model: nn.Module, pairs: list[Tapered], report: SwapReport, steps: int) -> None:
        self.model, self.pairs, self.report, self.steps = model, pairs, report, steps
        self.taken = 0

    @property
    def progress(self) -> float:
        """How much of the way is behind, 0 to 1."""
        return self.taken / self.steps

    @property
    def done(self) -> bool:
        """Whether the old norms are gone."""
        return self.taken >= self.steps

    def step(self) -> float:
        """Move every norm on by one step; the last step takes the old norms out. Gives the progress."""
        return self.resume(self.taken + 1)

    def resume(self, taken: int) -> float:
        """Go to where a run stood after so many steps, when it goes on from a checkpoint."""
        if taken < 0:
            raise FathomsError(f"taper: {taken} steps cannot have been taken; give 0 or more")
        if not self.done:
            self.taken = min(taken, self.steps)
            for pair in self.pairs:
                pair.t.fill_(self.progress)
            if self.done:
                for pair in self.pairs:
                    replace_module(self.model, pair, pair.new)
        return self.progress


def taper(
    model: nn.Module,
    steps: int,
    *,
    to: str = "learnable_scaler",
    only: Choice | None = None,
    calibrate: Any = None,
    how: str | None = None,
) -> Taper:
    """Let a model's norms fade into `to` over `steps` training steps, in the model itself.

    Args:
        model: Any module.
        steps: Calls of `step` from all old to all new.
        to: As for `swap_norms`, like `only`, `calibrate` and `how`, which set where the new parts start.

    >>> from fathoms import create_model
    >>> fading = taper(create_model("vit_digits", depth=1, num_classes=10), steps=100)
    >>> fading.step()
    0.01
    """
    if steps < 1:
        raise FathomsError(f"taper: steps={steps} is too few; use 1 or more, or swap_norms to swap at once")
    before = dict(model.named_modules())
    report = swap_norms(model, to, only=only, calibrate=calibrate, how=how)
    after = dict(model.named_modules())
    pairs = []
    for row in report:
        pair = Tapered(before[row.name], after[row.name])
        replace_module(model, after[row.name], pair)
        pairs.append(pair)
    return Taper(model, pairs, report, steps)
