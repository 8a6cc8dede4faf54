"""Recognise a norm by what it computes: a copy with random numbers is held against a short table of forms.

Every form is y = act(gain * u + shift), where u is the normalised input, gain and shift are vectors over the
channels, and the activation may be missing. The names of classes play no part in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError, reason
from fathoms.parts.norms import LearnableScaler
from fathoms.surgery.inputs import REFUSALS

Layout = Literal["last", "first"]

# Relative error at which a form counts as computed: modules compute in float32 inside, whatever their dtype.
_AGREES = 1e-5
_EPSILONS = (1e-5, 1e-6, 0.0)
# Names of a declared width, where no vector tells it.
_WIDTHS = ("normalized_shape", "num_features", "num_channels", "dim", "hidden_size")


class NotThisNormError(Exception):
    """The reason why a norm cannot be swapped; the report shows it."""


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
        u, y, uu, uy = (self.sums[name] / self.count for name in ("u", "y", "uu", "uy"))
        variance = uu - u * u
        flat = variance <= 1e-12 * uu + 1e-30
        slope = torch.where(flat, 0.0, (uy - u * y) / torch.where(flat, 1.0, variance))
        return slope, y - slope * u

    def error(self, slope: Tensor, shift: Tensor) -> float:
        """Root mean square of the residual, over that of y."""
        s, n = self.sums, self.count
        missed = s["yy"] - 2 * slope * s["uy"] - 2 * shift * s["y"]
        missed = missed + slope**2 * s["uu"] + 2 * slope * shift * s["u"] + n * shift**2
        return float((missed.sum().clamp_min(0.0) / s["yy"].sum().clamp_min(1e-30)).sqrt())


@dataclass(frozen=True)
class Form:
    """The function of a norm without its activation: gain * u + shift along one channel axis.

    Args:
        kind: Its name in the norm registry, or "batchnorm" or "groupnorm".
        dim: Number of channels.
        layout: Whether the channels are the last axis or the second.
        eps: Added to the variance, where there is one.
        groups: Number of groups of a GroupNorm.
        gain: Name of its gain; None if it has none.
        one_plus: Whether the gain is one plus that tensor.
        shift: Name of its shift; None if it has none.
        by_batch: Whether it computes something else in training mode.
        activation: Name of the submodule that follows it.
    """

    kind: str
    dim: int
    layout: Layout
    eps: float = 0.0
    groups: int = 1
    gain: str | None = None
    one_plus: bool = False
    shift: str | None = None
    by_batch: bool = False
    activation: str | None = None

    def rows(self, x: Tensor) -> Tensor:
        """Tokens as rows, channels as columns, in float64."""
        return channels_last(x.detach(), self.layout).flatten(0, -2).double()

    def learned(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Gain and shift of a module of this form, over all channels; None for one that it does not have."""
        gain, shift = (None if name is None else getattr(module, name) for name in (self.gain, self.shift))
        gain = gain + 1 if self.one_plus and gain is not None else gain
        return tuple(None if t is None else t.detach().flatten() for t in (gain, shift))  # pyrefly: ignore

    def line(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Gain and shift of a module as a map of each channel, with the running statistics of a BatchNorm."""
        gain, shift = self.learned(module)
        if self.kind != "batchnorm":
            return gain, shift
        mean, var = running_statistics(module)
        if mean is None or var is None:
            raise FathomsError(
                "swap_norms: a BatchNorm without running statistics is not a fixed map; use how='reset'"
            )
        slope = torch.rsqrt(var.detach().double().flatten() + self.eps)
        slope = slope if gain is None else slope * gain.double()
        moved = -mean.detach().double().flatten() * slope
        return slope, moved if shift is None else moved + shift.double()

    def output(self, module: nn.Module, x: Tensor) -> Tensor:
        """The output of a module of this form before its activation, as rows in float64."""
        last = channels_last(x.detach(), self.layout).double()
        u = normalised(self.kind, last, self.eps, self.groups, module).flatten(0, -2)
        gain, shift = self.learned(module)
        u = u if gain is None else u * gain.double()
        return u if shift is None else u + shift.double()


def channels_last(x: Tensor, layout: Layout) -> Tensor:
    """A tensor with its channels moved to the end."""
    return x.movedim(1, -1) if layout == "first" else x


def normalised(kind: str, x: Tensor, eps: float, groups: int = 1, module: nn.Module | None = None) -> Tensor:
    """The input of a norm, normalised as its kind does; channels last.

    Args:
        kind: The kind of norm.
        x: (..., channels).
        eps: Added to the variance.
        groups: Groups of channels of a GroupNorm.
        module: The norm, for its running statistics or the slope of its curve.
    """
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    if kind in ("layernorm", "rmsnorm"):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if kind == "scalenorm":
        return nn.functional.normalize(x, dim=-1, eps=eps)
    if kind == "groupnorm":
        grouped = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
        grouped = grouped - grouped.mean((1, 3), keepdim=True)
        return (grouped * torch.rsqrt(grouped.square().mean((1, 3), keepdim=True) + eps)).reshape(x.shape)
    if kind == "batchnorm":
        mean, var = running_statistics(module)
        if mean is None or var is None:
            var, mean = torch.var_mean(x, tuple(range(x.ndim - 1)), correction=0)
        return (x - mean.double().flatten()) * torch.rsqrt(var.double().flatten() + eps)
    if kind == "dyt":
        return torch.tanh(x * module.alpha.double())  # pyrefly: ignore
    if kind == "derf":
        return torch.erf(x * module.alpha.double() + module.shift.double())  # pyrefly: ignore
    return x


def running_statistics(module: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
    """Running mean and variance of a BatchNorm; None without them."""
    return getattr(module, "running_mean", None), getattr(module, "running_var", None)


def _is_vector(tensor: Tensor) -> bool:
    return sum(size != 1 for size in tensor.shape) <= 1


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Floating-point parameters and buffers of a module itself."""
    tensors = {**module._parameters, **module._buffers}
    return {name: t for name, t in tensors.items() if t is not None and t.is_floating_point()}


def is_called_norm(module: nn.Module) -> bool:
    """Whether a module's class calls it a norm: one that matches no form is then listed as left."""
    return "norm" in type(module).__name__.lower()


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module is small enough to be tried: vectors of its own, or none where its class is called a norm."""
    inside = [p for child in module.children() for p in child.parameters()]
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) or not all(map(_is_vector, inside)):
        return False
    own = _own(module)
    if is_called_norm(module):
        return bool(own) or not inside
    return bool(own) and all(map(_is_vector, own.values()))


@torch.no_grad()
def recognise(module: nn.Module, seen: list[tuple[int, ...]]) -> Form | None:
    """The form of a norm; None for a module that returns its input, which is no norm.

    Args:
        module: A module that may be a norm; it is copied, and the copy tried.
        seen: Shapes of the inputs that it gets in its model; empty if it was not seen running.

    Raises:
        NotThisNormError: It agrees with no form.
    """
    declared = getattr(module, "normalized_shape", None)
    if isinstance(declared, tuple | list) and len(declared) > 1:
        raise NotThisNormError(
            f"a {type(module).__name__} over {len(declared)} axes {tuple(declared)} has no channel axis to keep"
        )
    if any(not _is_vector(p) for p in _own(module).values()):
        raise NotThisNormError("its parameters vary along more than one axis")
    if (width := _width(module)) is None and not seen:
        raise NotThisNormError("its number of channels is not known; pass a batch as calibrate=")
    with torch.device("cpu"):
        try:
            twin = _random_copy(module)
        except REFUSALS as error:
            raise NotThisNormError(f"it cannot be copied for a trial ({reason(error)})") from error
        return _tried_at_shapes(twin, width, seen)


def _tried_at_shapes(twin: nn.Module, width: int | None, seen: list[tuple[int, ...]]) -> Form | None:
    """The form that a copy agrees with at the first shape that it takes and tells one."""
    fails, differs = "", ""
    for shape in _shapes(width, seen):
        x = _random_input(shape)
        try:
            return _tried(twin, x, twin(x.clone()), width, seen)
        except NotThisNormError as error:
            differs = str(error)
        except REFUSALS as error:
            fails = fails or f"its trial fails ({reason(error)})"
    if differs and (eps := float(getattr(twin, "eps", 0.0) or 0.0)) > 1e-3:
        differs = f"with its eps of {eps:g} it is none of the norms that can be swapped, whose eps is small"
    raise NotThisNormError(differs or fails)


def _tried(twin: nn.Module, x: Tensor, y: Any, width: int | None, seen: list[tuple[int, ...]]) -> Form | None:
    """The form that the output y of a copy agrees with; None where it is the input."""
    if not isinstance(y, Tensor) or y.shape != x.shape:
        raise NotThisNormError("its output is not a tensor of its input's shape")
    if torch.equal(y, x) and not isinstance(twin, LearnableScaler):
        return None
    form = _matching(twin, x, y, width)
    for shape in seen:
        if shape[-1 if form.layout == "last" else 1] != form.dim:
            raise NotThisNormError(f"its channel axis is not the same at inputs of shape {shape}")
    return form


def _width(module: nn.Module) -> int | None:
    """Number of channels: that of the vectors, or as declared."""
    sizes = [tensor.numel() for tensor in _own(module).values()]
    if max(sizes, default=0) > 1:
        return max(sizes)
    for name in _WIDTHS:
        value = getattr(module, name, None)
        value = value[0] if isinstance(value, tuple | list) and len(value) == 1 else value
        if isinstance(value, int):
            return value
    return max(sizes, default=None)


def _random_copy(module: nn.Module) -> nn.Module:
    """A copy on the CPU in float64 and evaluation mode, whose vectors are random and whose hooks are gone."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            hooks.clear()
    empty = any(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    twin = (twin.to_empty(device="cpu") if empty else twin.cpu()).double().eval()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        if not tensor.is_floating_point():
            tensor.zero_()
        elif name.endswith("running_var"):
            # So small that the eps next to it shows.
            tensor.copy_(1e-3 * (0.5 + torch.rand(tensor.shape, generator=generator)))
        elif empty or isinstance(tensor, nn.Parameter) or tensor.numel() > 1:
            tensor.copy_(0.8 + 0.3 * torch.randn(tensor.shape, generator=generator))
    return twin


def _random_input(shape: tuple[int, ...]) -> Tensor:
    """Random values off zero; from the second of the batch on so small that eps shows."""
    x = 0.5 + torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[1:] *= 0.03
    return x


def _shapes(width: int | None, seen: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Shapes to try: those seen, made small, then those that norms of this width take."""
    a, b, c = [size for size in (3, 5, 7, 11) if size != width][:3]
    usual = []
    if width is not None:
        usual = [(2, a, b, width), (2, width, a, b), (2, width, a), (2, width, a, b, c), (6, width)]
    shown = []
    for shape in dict.fromkeys(seen):
        sizes = iter((a, b, c, a, b, c))
        # A line through two tokens fits anything.
        batch = 2 if len(shape) > 2 else 6
        shown.append((batch, *(size if width in (None, size) else next(sizes) for size in shape[1:])))
        shown.append((batch, *shape[1:]))
    # Where the second axis is also the last, a form does not show which of both it means.
    first, second = (usual, shown) if any(len(shape) < 3 for shape in seen) else (shown, usual)
    yield from dict.fromkeys((*first, *second))


def _matching(twin: nn.Module, x: Tensor, y: Tensor, width: int | None) -> Form:
    """The form that a trial agrees with."""
    inner, twin = _activation(twin, x, y), _without_modules(twin)
    y = twin(x.clone())
    why = "it computes none of the norms that can be swapped"
    for form in _candidates(twin, x, y, width):
        last = channels_last(x, form.layout)
        u = normalised(form.kind, last, form.eps, form.groups, twin)
        moments = Moments()
        moments.add(u.flatten(0, -2), channels_last(y, form.layout).flatten(0, -2))
        slope, shift = moments.line()
        if not moments.error(slope, shift) < _AGREES:
            continue
        try:
            names = _named(twin, form, slope, shift)
        except NotThisNormError as error:
            why = str(error)
            continue
        again = copy.deepcopy(twin).train()(x.clone())
        by_batch = not torch.allclose(again.double(), y.double(), rtol=1e-3, atol=1e-5)
        gain, one_plus, bias = names
        return replace(form, gain=gain, one_plus=one_plus, shift=bias, by_batch=by_batch, activation=inner)
    raise NotThisNormError(why)


def _without_modules(twin: nn.Module) -> nn.Module:
    """The norm alone: whatever it calls is replaced by the identity."""
    bare = copy.deepcopy(twin)
    for name, _ in list(bare.named_children()):
        setattr(bare, name, nn.Identity())
    return bare


def _activation(twin: nn.Module, x: Tensor, y: Tensor) -> str | None:
    """Name of the submodule through which the norm's output goes, or None; several of them are refused."""
    found = [n for n, child in twin.named_children() if not isinstance(child, nn.Identity | nn.Dropout)]
    if not found:
        return None
    try:
        alone = _without_modules(twin)(x.clone())
        if torch.allclose(alone, y):
            return None
        if len(found) == 1 and torch.allclose(twin.get_submodule(found[0])(alone.clone()), y):
            return found[0]
    except REFUSALS as error:
        raise NotThisNormError(f"its trial without {found[0]} fails ({reason(error)})") from error
    raise NotThisNormError(f"it computes something else than a norm followed by {found[0]}")


def _candidates(twin: nn.Module, x: Tensor, y: Tensor, width: int | None) -> Iterator[Form]:
    """Every form that may agree, the usual ones first."""
    own = [value for value in vars(twin).values() if isinstance(value, float) and 0.0 <= value < 0.1]
    epsilons = tuple(dict.fromkeys((*own, *_EPSILONS)))
    dims: dict[Layout, int] = {"last": x.shape[-1], "first": x.shape[1]}
    # Statistics of the input make a norm blind to its scale.
    blind = torch.allclose(twin(2 * x)[0].double(), y[0].double(), rtol=1e-2, atol=1e-2)
    running = running_statistics(twin)[1] is not None
    kinds = ["learnable_scaler"] if isinstance(twin, LearnableScaler) else []
    if isinstance(getattr(twin, "alpha", None), Tensor):
        kinds += ["dyt", "derf"] if isinstance(getattr(twin, "shift", None), Tensor) else ["dyt"]
    kinds += ["batchnorm"] if running else []
    kinds += ["layernorm", "rmsnorm", "scalenorm"] if blind else []
    for kind in kinds:
        for layout, dim in dims.items():
            if width in (None, 1, dim):
                yield from (Form(kind, dim, layout, eps) for eps in epsilons)
    dim = dims["first"]
    if blind and width in (None, 1, dim):
        declared = getattr(twin, "num_groups", None)
        for groups in dict.fromkeys((declared if isinstance(declared, int) else 1, 1, dim)):
            if groups > 0 and dim % groups == 0:
                yield from (Form("groupnorm", dim, "first", eps, groups) for eps in epsilons)
        yield from (Form("batchnorm", dim, "first", eps) for eps in epsilons if not running)


def _named(twin: nn.Module, form: Form, slope: Tensor, shift: Tensor) -> tuple[str | None, bool, str | None]:
    """Names of gain and shift among the vectors of a copy, and whether the gain is one plus its vector."""
    used = {"running_mean", "running_var"} | ({"alpha", "shift"} if form.kind in ("dyt", "derf") else set())
    vectors = {n: t.flatten() for n, t in _own(twin).items() if t.numel() in (1, form.dim) and n not in used}

    def close(a: Tensor, b: Tensor | float) -> bool:
        return torch.allclose(a, torch.as_tensor(b, dtype=a.dtype).expand_as(a), rtol=1e-3, atol=1e-4)

    gains: list[tuple[str | None, bool, Any]] = [(None, False, 1.0)]
    gains += [(name, plus, value + plus) for name, value in vectors.items() for plus in (False, True)]
    shifts: list[tuple[str | None, Any]] = [(None, 0.0), *vectors.items()]
    gain = next(((name, plus) for name, plus, value in gains if close(slope, value)), None)
    bias = next(((name,) for name, value in shifts if close(shift, value)), None)
    if gain is None or bias is None:
        what = "gain" if gain is None else "shift"
        raise NotThisNormError(f"its {what} is none of its own parameters")
    return (*gain, *bias)
