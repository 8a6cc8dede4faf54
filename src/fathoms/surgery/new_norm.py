"""Build the norm that replaces another, with its scale and shift or fitted to its outputs, and put it in its place.

Sites are fitted in the order in which they run. The inputs of each fit come from the network whose earlier sites
are swapped already, the outputs from the old network. So a site also compensates for the error of those before it,
at the price of one forward pass of both networks over the batches for each site.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fathoms.errors import FathomsError
from fathoms.parts.modes import hooked
from fathoms.parts.norms import NORMS, Derf, DyT, LearnableScaler, LearnableScaler2d, NoNorm, ScaleNorm
from fathoms.surgery.inputs import Inputs, home_of, run
from fathoms.surgery.norm_forms import Form, Moments, normalised
from fathoms.surgery.norm_sites import NormSite


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> list[str]:
    """Replace `old` by `new` everywhere in `model`; a shared module stays shared. Returns the paths."""
    paths = []
    for path, parent in list(model.named_modules(remove_duplicate=True)):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new
                paths.append(f"{path}.{name}" if path else name)
        if isinstance(parent, nn.TransformerEncoderLayer):
            _choose_path(parent)
        # What it uses without having it, as the joins of a block use a scale that they share.
        for name in [name for name, value in vars(parent).items() if value is old]:
            object.__setattr__(parent, name, new)
    return paths


def _choose_path(layer: nn.TransformerEncoderLayer) -> None:
    """Switch torch's fused inference, which reads the weights of two LayerNorms, off where there are none, else on."""
    norms = (layer.norm1, layer.norm2)
    fused = all(isinstance(norm, nn.LayerNorm) and norm.weight is not None for norm in norms)
    kinds = ((nn.functional.relu, nn.ReLU), (nn.functional.gelu, nn.GELU))
    own = [n for n, (f, c) in enumerate(kinds, 1) if layer.activation is f or isinstance(layer.activation, c)]
    # The fused path alone reads this.
    layer.activation_relu_or_gelu = own[0] if fused and own else 0


class ChannelsFirst(nn.Module):
    """A channels-last norm applied to tensors whose channels are the second axis."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Float[Tensor, "B C *map"]) -> Float[Tensor, "B C *map"]:
        """Move the channels to the end, normalise, move them back."""
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class ThenActivation(nn.Module):
    """A norm followed by the activation of the module it replaces, for timm's fused norms."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.act = activation

    def forward(self, x: Float[Tensor, "B C *map"]) -> Float[Tensor, "B C *map"]:
        """Normalise, then apply the activation."""
        return self.act(self.norm(x))


@dataclass(frozen=True)
class NewNorm:
    """A new norm, and the module that goes into the model.

    Args:
        part: The norm itself, from the registry.
        module: The part, or a wrapper that changes the layout or keeps an activation.
        note: Which parameters of the old norm have no place in the new one.
    """

    part: nn.Module
    module: nn.Module
    note: str = ""


def build_part(site: NormSite, to: str, model: nn.Module, init: str | float | None = None) -> NewNorm:
    """The norm `to` for a site, at `init` or its own start, with dtype and device of the old one, frozen if that was.

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
    if site.form.activation is not None:
        module = ThenActivation(module, site.module.get_submodule(site.form.activation))
    part.to(**(home_of(site.module) or home_of(model)))  # pyrefly: ignore
    # Those of an activation inside the old norm are not the norm's; buffers in their place are frozen.
    names = [name for name in (site.form.gain, site.form.shift) if name is not None]
    replaced = [getattr(site.module, name) for name in names] or list(model.parameters())
    part.requires_grad_(not replaced or any(parameter.requires_grad for parameter in replaced))
    return NewNorm(part, module)


def as_start(text: str) -> str | float:
    """A start out of a name: a number where it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def resets(to: str, how: str | None) -> str:
    """The way of a swap whose new norms have a start of their own."""
    if not NORMS.takes(to, "init"):
        raise FathomsError(f"swap_norms: norm {to!r} takes no init; leave it out")
    if how not in (None, "reset"):
        why = f"how={how!r} fills the new norms"
        raise FathomsError(f"swap_norms: init would not be used: {why}; leave it out")
    return "reset"


@torch.no_grad()
def carry(site: NormSite, new: NewNorm) -> NewNorm:
    """Copy the old norm's learned scale and shift into the new part, where it has parameters for them."""
    scaler = isinstance(new.part, LearnableScaler)
    weight, bias = site.form.line(site.module) if scaler else site.form.learned(site.module)
    places = ("a", "b") if scaler else ("weight", "bias")
    lost = []
    for name, value in zip(places, (weight, bias), strict=True):
        target = getattr(new.part, name, None)
        if value is None:
            continue
        value = value.expand(site.dim)
        if isinstance(target, nn.Parameter) and target.shape == value.shape:
            target.copy_(value)
        elif bool((value != (1.0 if name in ("a", "weight") else 0.0)).any()):
            lost.append({"a": "scale", "weight": "scale", "b": "shift", "bias": "shift"}[name])
    note = f"has no place for the old {' and '.join(lost)}" if lost else ""
    return NewNorm(new.part, new.module, note)


# Slopes tried for DyT and Derf, in units of one over the standard deviation of the inputs: from nearly straight
# to nearly a step function, and then between the neighbours of the best.
_COARSE = torch.logspace(-1.5, 1.0, 16, dtype=torch.float64)
_FINE = torch.linspace(0.7, 1.4, 15, dtype=torch.float64)


def record_pairs(
    teacher: nn.Module, student: nn.Module, sites: dict[str, tuple[Form, nn.Module, nn.Module]], batch: Inputs
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """For each call of each site: its input in the student, and the output of the teacher's norm, both as rows.

    `sites` are the function of each norm, the norm in the teacher, and what stands there in the student, whose earlier
    sites are swapped.
    """
    rows: dict[nn.Module, list[Tensor]] = {}

    def keep(module: nn.Module, kept: Callable[[nn.Module, Tensor], Tensor]) -> RemovableHandle:
        def hook(module: nn.Module, given: Any, named: Any) -> None:
            rows[module].append(kept(module, next(iter((*given, *named.values())))))

        rows[module] = []
        return module.register_forward_pre_hook(hook, with_kwargs=True)

    handles = [keep(old, form.output) for form, old, _ in sites.values()]
    handles += [keep(new, lambda _, x, form=form: form.rows(x)) for form, _, new in sites.values()]
    with hooked(*handles):
        run(teacher, batch)
        run(student, batch)
    return {name: list(zip(rows[new], rows[old], strict=True)) for name, (_, old, new) in sites.items()}


def running_order(model: nn.Module, modules: dict[str, nn.Module], batch: Inputs) -> list[str]:
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


# The normalised input of each norm of the registry whose gain and shift are fitted to it; one without any is held.
_KINDS = {nn.LayerNorm: "layernorm", nn.RMSNorm: "rmsnorm", ScaleNorm: "scalenorm", NoNorm: "none"}
_KINDS |= {LearnableScaler: "learnable_scaler"}
_AFFINE = (("a", "weight", "g"), ("b", "bias"))


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
    kind = next((kind for known, kind in _KINDS.items() if isinstance(part, known)), None)
    if kind is None:
        raise FathomsError(f"calibrate: {type(part).__name__} has no rule to fit it; use how='keep'")
    eps = float(getattr(part, "eps", None) or 1e-6)
    moments = _moments(pairs, lambda x: normalised(kind, x, eps))
    weight, bias = (
        next((t for n in names if (t := getattr(part, n, None)) is not None), None) for names in _AFFINE
    )
    slope, shift = moments.line()
    if bias is None:
        # Through the origin; one number for all channels is of all of them.
        uy, uu = moments.sums["uy"], moments.sums["uu"]
        uy, uu = (uy.sum(), uu.sum()) if weight is None or weight.numel() == 1 else (uy, uu)
        slope = torch.ones_like(uy) if weight is None else uy / uu.clamp_min(1e-30)
        shift = torch.zeros_like(slope)
    for parameter, value in ((weight, slope), (bias, shift)):
        if parameter is not None:
            parameter.copy_(value)
    return moments.error(slope, shift)
