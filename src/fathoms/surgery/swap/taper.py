"""Swap norms gradually during fine-tuning: each norm fades into its successor over many updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.surgery.inputs import check_model
from fathoms.surgery.replace import replace_module
from fathoms.surgery.report import SwapReport
from fathoms.surgery.swap.sites import Choice
from fathoms.surgery.swap.swap import swap_norms


class Tapered(nn.Module):
    """A norm that fades into another: y = (1 - t) old(x) + t new(x).

    `t` is a buffer, so it is saved with the model, and a compiled model sees it change.
    """

    t: Tensor

    def __init__(self, old: nn.Module, new: nn.Module) -> None:
        super().__init__()
        self.old, self.new = old, new
        tensor = next(iter((*new.parameters(), *old.parameters())), torch.zeros(()))
        self.register_buffer("t", torch.zeros((), device=tensor.device))

    def forward(self, x: Tensor) -> Tensor:
        """Interpolate between both outputs."""
        return torch.lerp(self.old(x).float(), self.new(x).float(), self.t.float()).to(x.dtype)


class Taper:
    """The norms of a model that fade into others; call `step` after every update.

    After the last call only the new norms are left in the model, under the names of the old ones. Create the
    optimizer after this: the parameters of the new norms are among the model's.

    Args:
        report: The norms that are being swapped.
        steps: Number of updates from all old to all new.
    """

    def __init__(self, model: nn.Module, pairs: list[Tapered], report: SwapReport, steps: int) -> None:
        self.model, self.pairs, self.report, self.steps = model, pairs, report, steps
        self.taken = 0

    @property
    def progress(self) -> float:
        """The weight of the new norms, 0 to 1."""
        return self.taken / self.steps

    @property
    def done(self) -> bool:
        """Whether the old norms are gone."""
        return self.taken >= self.steps

    def step(self) -> float:
        """Advance every norm by one update; the last one removes the old norms. Returns the progress."""
        return self.resume(self.taken + 1)

    def resume(self, taken: int) -> float:
        """Set the number of updates taken, when a run resumes from a checkpoint. Returns the progress."""
        if taken < 0:
            raise FathomsError(
                f"taper: taken={taken} is negative; give the number of updates so far, 0 or more"
            )
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
    """Let a model's norms fade into `to` over `steps` updates, in place.

    Args:
        model: Any module.
        steps: Number of updates from all old to all new.
        to: As for `swap_norms`, like `only`, `calibrate` and `how`, which set the init of the new norms.

    >>> from fathoms import create_model
    >>> fading = taper(create_model("vit_digits", depth=1, num_classes=10), steps=100)
    >>> fading.step()
    0.01
    """
    check_model(model, "taper")
    if not isinstance(steps, int) or steps < 1:
        raise FathomsError(
            f"taper: steps={steps!r}: use whole updates, 1 or more, or swap_norms to swap at once"
        )
    before = dict(model.named_modules())
    report = swap_norms(model, to, only=only, calibrate=calibrate, how=how)
    after = dict(model.named_modules())
    pairs = []
    for row in report:
        pair = Tapered(before[row.name], after[row.name])
        replace_module(model, after[row.name], pair)
        pairs.append(pair)
    return Taper(model, pairs, report, steps)
