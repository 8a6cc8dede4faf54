"""Calibrate a new norm: the least-squares fit of the old norm's outputs, channel by channel.

Sites are fitted in the order in which they run. The inputs of each fit come from the network whose earlier sites
are swapped already, the outputs from the old network. So a site also compensates for the error of those before it,
at the price of one forward pass of both networks over the batches for each site.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.models.hooks import hooked
from fathoms.parts.norms.dyt import Derf, DyT
from fathoms.parts.norms.norm import NoNorm, ScaleNorm
from fathoms.parts.norms.scaler import LearnableScaler
from fathoms.surgery.inputs import run
from fathoms.surgery.swap.sites import Layout

# Slopes tried for DyT and Derf, in units of one over the standard deviation of the inputs: from nearly straight
# to nearly a step function, and then between the neighbours of the best.
_COARSE = torch.logspace(-1.5, 1.0, 16, dtype=torch.float64)
_FINE = torch.linspace(0.7, 1.4, 15, dtype=torch.float64)


class Moments:
    """Sums over tokens that a least-squares fit of y = w u + b needs, for each channel."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, u: Tensor, y: Tensor) -> None:
        """Add inputs u and their desired outputs y, both (tokens, channels)."""
        self.count += len(u)
        for name, value in {"u": u, "y": y, "uu": u * u, "uy": u * y, "yy": y * y}.items():
            total = value.sum(0)
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def line(self) -> tuple[Tensor, Tensor]:
        """Slope and intercept of each channel; a channel that never varies gets slope zero."""
        u, y = self.sums["u"] / self.count, self.sums["y"] / self.count
        variance = self.sums["uu"] / self.count - u * u
        covariance = self.sums["uy"] / self.count - u * y
        flat = variance <= 1e-12 * (self.sums["uu"] / self.count) + 1e-30
        slope = torch.where(flat, 0.0, covariance / torch.where(flat, 1.0, variance))
        return slope, y - slope * u

    def error(self, slope: Tensor, shift: Tensor) -> float:
        """Root mean square of the residual, over that of y."""
        s, n = self.sums, self.count
        missed = s["yy"] - 2 * slope * s["uy"] - 2 * shift * s["y"]
        missed = missed + slope**2 * s["uu"] + 2 * slope * shift * s["u"] + n * shift**2
        return float((missed.sum().clamp_min(0.0) / s["yy"].sum().clamp_min(1e-30)).sqrt())


def _rows(x: Tensor, layout: Layout) -> Tensor:
    """Tokens as rows, channels as columns, in float64."""
    last = x.movedim(1, -1) if layout == "first" else x
    return last.detach().flatten(0, -2).double()


def record_pairs(
    teacher: nn.Module,
    student: nn.Module,
    sites: tuple[nn.Module, nn.Module],
    batches: list[Tensor],
    layout: Layout,
) -> list[tuple[Tensor, Tensor]]:
    """For each call of a site: its input in the student, and the output of the teacher's norm."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep_input(_module: nn.Module, given: Any, _output: Any) -> None:
        inputs.append(_rows(given[0], layout))

    def keep_output(_module: nn.Module, _given: Any, output: Any) -> None:
        outputs.append(_rows(output, layout))

    handles = (sites[0].register_forward_hook(keep_output), sites[1].register_forward_hook(keep_input))
    with hooked(*handles):
        for batch in batches:
            run(teacher, batch)
            run(student, batch)
    return list(zip(inputs, outputs, strict=True))


def running_order(model: nn.Module, modules: dict[str, nn.Module], batch: Tensor) -> list[str]:
    """The names in the order in which their modules first run; a module that never runs is an error."""
    order: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
        for name, module in modules.items()
    ]
    with hooked(*handles):
        run(model, batch)
    unused = [name for name in modules if name not in order]
    if unused:
        raise FathomsError(
            f"{unused[0]}: the batches never reach this norm, so it cannot be calibrated; leave it out with only="
        )
    return list(dict.fromkeys(order))


def _moments(pairs: list[tuple[Tensor, Tensor]], before_affine: Callable[[Tensor], Tensor]) -> Moments:
    moments = Moments()
    for x, y in pairs:
        moments.add(before_affine(x), y)
    return moments


def _fit_curve(part: DyT | Derf, pairs: list[tuple[Tensor, Tensor]]) -> float:
    curve = torch.tanh if isinstance(part, DyT) else torch.erf
    spread = torch.cat([x for x, _ in pairs]).std().clamp_min(1e-12)
    best: tuple[float, Tensor, Tensor, Tensor] | None = None
    for grid in (_COARSE.to(spread.device) / spread, _FINE):
        base = 1.0 if best is None else best[1]
        for alpha in grid.to(spread.device) * base:
            moments = _moments(pairs, lambda x, alpha=alpha: curve(alpha * x))
            slope, shift = moments.line()
            error = moments.error(slope, shift)
            if best is None or error < best[0]:
                best = (error, alpha, slope, shift)
    assert best is not None
    error, alpha, slope, shift = best
    part.alpha.fill_(float(alpha))
    if isinstance(part, Derf):
        part.shift.zero_()
    part.weight.copy_(slope)
    part.bias.copy_(shift)
    return error


def _fit_line(weight: Tensor, bias: Tensor, moments: Moments) -> float:
    slope, shift = moments.line()
    weight.copy_(slope)
    bias.copy_(shift)
    return moments.error(slope, shift)


def _without_affine(part: nn.Module) -> Callable[[Tensor], Tensor]:
    """A LayerNorm or RMSNorm without its learned scale and shift."""
    eps = float(getattr(part, "eps", None) or 1e-6)
    if isinstance(part, nn.LayerNorm):
        return lambda x: (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + eps)
    return lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@torch.no_grad()
def fit(part: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Set a new norm's parameters to the least-squares fit of the pairs.

    Args:
        part: A norm from the registry.
        pairs: Inputs and desired outputs, (tokens, channels), call by call.

    Returns:
        Root mean square of the residual, over that of the desired outputs.
    """
    if isinstance(part, DyT | Derf):
        return _fit_curve(part, pairs)
    if isinstance(part, LearnableScaler) and part.a is not None and part.b is not None:
        return _fit_line(part.a, part.b, _moments(pairs, lambda x: x))
    if isinstance(part, nn.LayerNorm):
        return _fit_line(part.weight, part.bias, _moments(pairs, _without_affine(part)))
    if isinstance(part, nn.RMSNorm):
        moments = _moments(pairs, _without_affine(part))
        slope = moments.sums["uy"] / moments.sums["uu"].clamp_min(1e-30)
        part.weight.copy_(slope)
        return moments.error(slope, torch.zeros_like(slope))
    if isinstance(part, ScaleNorm):
        moments = _moments(pairs, lambda x: nn.functional.normalize(x, dim=-1, eps=part.eps))
        g = moments.sums["uy"].sum() / moments.sums["uu"].sum().clamp_min(1e-30)
        part.g.fill_(float(g))
        return moments.error(g, torch.zeros_like(g))
    if isinstance(part, NoNorm):
        moments = _moments(pairs, lambda x: x)
        return moments.error(torch.ones(()).to(pairs[0][0]), torch.zeros(()).to(pairs[0][0]))
    raise FathomsError(f"calibrate: {type(part).__name__} has no rule to fit it; use how='keep'")
