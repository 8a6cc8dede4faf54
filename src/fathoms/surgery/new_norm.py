"""Build the norm that replaces another, with its scale and shift or fitted to its outputs, and put it in its place.

Sites are fitted in the order in which they run. The inputs of each fit come from the network whose earlier sites
are swapped already, the outputs from the old network. So a site also compensates for the error of those before it,
at the price of one forward pass of both networks over the batches for each site.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.parts.norms import NORMS, Derf, DyT, LearnableScaler, LearnableScaler2d, NoNorm, ScaleNorm
from fathoms.surgery.inputs import Inputs
from fathoms.surgery.norm_forms import Moments, normalised
from fathoms.surgery.norm_sites import NormSite
from fathoms.surgery.trial import home_of, replace_module, watch


class ChannelsFirst(nn.Module):
    """A channels-last norm applied to tensors whose channels are the second axis."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Float[Tensor, "B C *map"]) -> Float[Tensor, "B C *map"]:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class ThenActivation(nn.Module):
    """A norm followed by the activation of the module it replaces, for timm's fused norms."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.act = activation

    def forward(self, x: Float[Tensor, "B C *map"]) -> Float[Tensor, "B C *map"]:
        return self.act(self.norm(x))


@dataclass(frozen=True)
class NewNorm:
    """The new norm of a site, the module that goes into the model, and what of the old one has no place in it."""

    site: NormSite
    part: nn.Module
    module: nn.Module
    note: str


def build_part(
    site: NormSite, to: str, model: nn.Module, init: str | float | None, keep: bool = False
) -> NewNorm:
    """The norm `to` for a site, at `init`, its own start or the old one's scale and shift; frozen if that was.

    A norm whose gain and shift have been folded away has no parameters; then those of the model decide.
    """
    eps = (site.form.eps or None) if to in ("layernorm", "rmsnorm") else None
    # In place of a trained norm it starts at the identity, not at the random scales of a new network.
    start = {"init": init or "ones"} if to == "learnable_scaler" else {"init": init}
    if to == "learnable_scaler" and site.form.layout == "first":
        part: nn.Module = LearnableScaler2d(site.dim, **start)  # pyrefly: ignore
        module = part
    else:
        part = NORMS.build(to, site.dim, eps=eps, **start)  # pyrefly: ignore
        module = ChannelsFirst(part) if site.form.layout == "first" else part
    if site.form.after is not None:
        module = ThenActivation(module, site.module.get_submodule(site.form.after))
    part.to(**(home_of(site.module) or home_of(model)))  # pyrefly: ignore
    # Those of an activation inside the old norm are not the norm's; buffers in their place are frozen.
    names = [name for name in (site.form.gain, site.form.shift) if name is not None]
    replaced = [getattr(site.module, name) for name in names] or list(model.parameters())
    part.requires_grad_(not replaced or any(parameter.requires_grad for parameter in replaced))
    module.train(site.module.training)
    return NewNorm(site, part, module, _carry(site, part) if keep else "")


def start_of(
    to: str, init: str | float | None, how: str | None
) -> tuple[str, str | float | None, str | None]:
    """Name, start and way of a swap; the name may hold the start, as "dyt:0.8", which resets the new norms."""
    to, _, start = to.partition(":") if isinstance(to, str) else (to, "", "")
    NORMS.check(to, "swap_norms")
    if start:
        try:
            init = float(start)
        except ValueError:
            init = start
    if init is None:
        return to, init, how
    if not NORMS.takes(to, "init"):
        raise FathomsError(f"swap_norms: norm {to!r} takes no init; leave it out")
    if how not in (None, "reset"):
        raise FathomsError(
            f"swap_norms: init would not be used: how={how!r} fills the new norms; leave it out"
        )
    return to, init, "reset"


@torch.no_grad()
def _carry(site: NormSite, part: nn.Module) -> str:
    """Copy the old norm's learned scale and shift into the new part; a note on those that it has no place for."""
    scaler = isinstance(part, LearnableScaler)
    values = site.form.line(site.module) if scaler else site.form.learned(site.module)
    places = (
        (("a", "scale", 1.0), ("b", "shift", 0.0))
        if scaler
        else (("weight", "scale", 1.0), ("bias", "shift", 0.0))
    )
    lost = []
    for (name, word, neutral), value in zip(places, values, strict=True):
        target = getattr(part, name, None)
        if value is not None and isinstance(target, nn.Parameter) and target.numel() == site.dim:
            target.copy_(value.expand(site.dim))
        elif value is not None and bool((value != neutral).any()):
            lost.append(word)
    return f"has no place for the old {' and '.join(lost)}" if lost else ""


# A gain and a shift of each channel go through any two rows.
ENOUGH_ROWS = 8

# Slopes tried for DyT and Derf, in units of one over the standard deviation of the inputs: from nearly straight
# to nearly a step function, and then between the neighbours of the best.
_COARSE = torch.logspace(-1.5, 1.0, 16, dtype=torch.float64)
_FINE = torch.linspace(0.7, 1.4, 15, dtype=torch.float64)


# Inputs and desired outputs of a norm, (tokens, channels) in float64, call by call.
Pairs = list[tuple[Tensor, Tensor]]


def _record(teacher: nn.Module, student: nn.Module, new: list[NewNorm], batch: Inputs) -> list[Pairs]:
    """For each call of each norm: its input in the student, the old or the new one, and the output of the teacher's."""
    rows: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in new]

    def keep(kept: list[Tensor], of: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> None:
        kept.append(of(next(iter((*args, *kwargs.values())))))

    olds, stands = {}, {}
    for each, (given, wanted) in zip(new, rows, strict=True):
        form, old = each.site.form, teacher.get_submodule(each.site.name)
        olds[old] = partial(keep, wanted, partial(form.output, old))
        stands[student.get_submodule(each.site.name)] = partial(keep, given, form.rows)
    watch(teacher, batch, olds)
    watch(student, batch, stands)
    for each, (given, wanted) in zip(new, rows, strict=True):
        if len(given) != len(wanted):
            why = f"its code calls the new norm {len(given)} times and the old one {len(wanted)} times"
            raise FathomsError(f"{each.site.name}: {why}; leave it out with only=")
    return [list(zip(*each, strict=True)) for each in rows]


def fit_in_order(model: nn.Module, teacher: nn.Module, new: list[NewNorm], batches: list[Inputs]) -> None:
    """Fit new norms in the order in which they first run, those not fitted yet being the old ones."""
    for each in new:
        replace_module(model, each.module, each.site.module)
    order: dict[str, NewNorm] = {}
    seen = {each.site.module: lambda *_, each=each: order.setdefault(each.site.name, each) for each in new}
    watch(model, batches[0], seen)
    for name in [each.site.name for each in new if each.site.name not in order]:
        why = "the batches never reach this norm, so it cannot be calibrated; leave it out with only="
        raise FathomsError(f"{name}: {why}")
    for name, each in order.items():
        pairs = [pair for batch in batches for pair in _record(teacher, model, [each], batch)[0]]
        _refuse_few_rows(name, each.part, [x for x, _ in pairs])
        fit(each.part, pairs)
        replace_module(model, each.site.module, each.module)


def _refuse_few_rows(name: str, part: nn.Module, inputs: list[Tensor]) -> None:
    """Refuse a fit that its rows do not determine: it is exact on them, with gains that mean nothing."""
    seen, one = sum(map(len, inputs)), inputs[0][0]
    few = seen < ENOUGH_ROWS
    # A matrix gives equal rows of a batch equal numbers but for rounding.
    same = few or all(torch.allclose(x, one, atol=1e-6 * float(one.abs().max())) for x in inputs)
    if same and list(part.parameters()):
        why = f"fewer than the {ENOUGH_ROWS} that a fit needs" if few else "all the same"
        raise FathomsError(
            f"swap_norms: {name} sees {seen} rows of calibrate=, {why}; give more images, or how='keep'"
        )


@torch.no_grad()
def errors_of(
    model: nn.Module, teacher: nn.Module, new: list[NewNorm], batches: list[Inputs]
) -> dict[str, float]:
    """Relative error of each new norm against the old norm's outputs; none for one that never runs."""
    sums = {each.site.name: torch.zeros(2, dtype=torch.float64) for each in new}
    for batch in batches:
        for each, pairs in zip(new, _record(teacher, model, new, batch), strict=True):
            part = copy.deepcopy(each.part).double()
            for x, y in pairs:
                sums[each.site.name] += torch.stack([(y - part(x)).square().sum(), y.square().sum()]).cpu()
    return {name: float(missed / whole) ** 0.5 for name, (missed, whole) in sums.items() if whole > 0.0}


# The normalised input of each norm of the registry whose gain and shift are fitted to it; one without any is held.
_KINDS = {nn.LayerNorm: "layernorm", nn.RMSNorm: "rmsnorm", ScaleNorm: "scalenorm", NoNorm: "none"}
_KINDS |= {LearnableScaler: "learnable_scaler", DyT: "dyt", Derf: "derf"}
_AFFINE = (("a", "weight", "g"), ("b", "bias"))


def _moments(pairs: Pairs, before_affine: Callable[[Tensor], Tensor]) -> Moments:
    moments = Moments()
    for x, y in pairs:
        moments.add(before_affine(x), y)
    return moments


def _fit_slope(part: DyT | Derf, pairs: Pairs) -> None:
    """Set the slope of a curve, and no shift in it."""
    curve = torch.tanh if isinstance(part, DyT) else torch.erf
    spread = torch.cat([x for x, _ in pairs]).std().clamp_min(1e-12)

    def error(alpha: Tensor) -> float:
        moments = _moments(pairs, lambda x: curve(alpha * x))
        return moments.error(*moments.line())

    coarse = min(_COARSE.to(spread.device) / spread, key=error)
    part.alpha.fill_(float(min(coarse * _FINE.to(spread.device), key=error)))
    if isinstance(part, Derf):
        part.shift.zero_()


@torch.no_grad()
def fit(part: nn.Module, pairs: Pairs) -> None:
    """Set the parameters of a norm of the registry to the least-squares fit of the pairs."""
    kind = next((kind for known, kind in _KINDS.items() if isinstance(part, known)), None)
    if kind is None:
        raise FathomsError(f"calibrate: {type(part).__name__} has no rule to fit it; use how='keep'")
    if isinstance(part, DyT | Derf):
        _fit_slope(part, pairs)
    eps = float(getattr(part, "eps", None) or 1e-6)
    moments = _moments(pairs, lambda x: normalised(kind, x, eps, module=part))
    found = ((getattr(part, name, None) for name in names) for names in _AFFINE)
    weight, bias = (next((own for own in each if own is not None), None) for each in found)
    slope, shift = moments.line()
    if bias is None and weight is not None:
        # Through the origin; one number for all channels is of all of them.
        uy, uu = moments.sums["uy"], moments.sums["uu"]
        slope = uy.sum() / uu.sum() if weight.numel() == 1 else uy / uu.clamp_min(1e-30)
    for parameter, value in ((weight, slope), (bias, shift)):
        if parameter is not None:
            parameter.copy_(value)
