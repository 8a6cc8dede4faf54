"""Recognise a norm by what it computes: a copy with random numbers is held against a short table of forms.

Every form is y = after(gain * u + shift): u is the normalised input, gain and shift are vectors over the channels,
and `after` is a module inside the norm, such as an activation or a dropout. The names of classes play no part in it.
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
    """The reason why a module is no norm that can be swapped; `is_norm` if it is one by what it computes."""

    def __init__(self, why: str, is_norm: bool = False) -> None:
        super().__init__(why)
        self.is_norm = is_norm


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
    """The function of a norm: after(gain * u + shift) along one channel axis.

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
        after: Name of the module inside it through which its output goes, such as its activation.
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
    after: str | None = None

    def channels_last(self, x: Tensor) -> Tensor:
        """A tensor with its channels moved to the end, in float64."""
        return (x.movedim(1, -1) if self.layout == "first" else x).detach().double()

    def rows(self, x: Tensor) -> Tensor:
        """Tokens as rows, channels as columns, in float64."""
        return self.channels_last(x).flatten(0, -2)

    def normalised(self, module: nn.Module | None, x: Tensor) -> Tensor:
        """The input of a norm, normalised by the statistics that its kind has, as rows in float64."""
        return normalised(self.kind, self.channels_last(x), self.eps, self.groups, module).flatten(0, -2)

    def learned(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Gain and shift of a module of this form, over all channels; None for one that it does not have."""
        gain, shift = (None if name is None else getattr(module, name) for name in (self.gain, self.shift))
        gain = gain + 1 if self.one_plus and gain is not None else gain
        return tuple(None if t is None else t.detach().flatten() for t in (gain, shift))  # pyrefly: ignore

    def line(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Gain and shift of a module as a map of each channel, with the running statistics of a BatchNorm."""
        if self.kind != "batchnorm":
            return self.learned(module)
        if (var := getattr(module, "running_var", None)) is None:
            why = "a BatchNorm without running statistics is not a fixed map; use how='reset'"
            raise FathomsError(f"swap_norms: {why}")
        shift, top = self.output(
            module, torch.stack([torch.zeros_like(var), torch.ones_like(var)]).flatten(1)
        )
        return top - shift, shift

    def output(self, module: nn.Module, x: Tensor, of_batch: bool = False) -> Tensor:
        """What a module of this form gives to the one after it, as rows in float64; `of_batch` as in training."""
        u = self.normalised(None if of_batch else module, x)
        gain, shift = self.learned(module)
        u = u if gain is None else u * gain.double()
        return u if shift is None else u + shift.double()


def normalised(kind: str, x: Tensor, eps: float, groups: int = 1, module: nn.Module | None = None) -> Tensor:
    """Channels-last x, normalised as a kind does; `module` has running statistics, or the slope of a curve."""
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
        mean, var = (getattr(module, name, None) for name in ("running_mean", "running_var"))
        if mean is None or var is None:
            var, mean = torch.var_mean(x, tuple(range(x.ndim - 1)), correction=0)
        return (x - mean.double().flatten()) * torch.rsqrt(var.double().flatten() + eps)
    if kind == "dyt":
        return torch.tanh(x * module.alpha.double())  # pyrefly: ignore
    if kind == "derf":
        return torch.erf(x * module.alpha.double() + module.shift.double())  # pyrefly: ignore
    return x


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
        seen: Shapes of the inputs that it gets in its model, at all of which it must have the form; may be empty.

    Raises:
        NotThisNormError: It agrees with no form.
    """
    if not all(map(_is_vector, _own(module).values())):
        raise NotThisNormError("it has more than one axis of channels")
    if (width := _width(module)) is None and not seen:
        raise NotThisNormError("its number of channels is not known; pass a batch as calibrate=")
    # A line through two tokens fits anything.
    real: list[tuple[int, ...]] = [(2 if len(shape) > 2 else 6, *shape[1:]) for shape in seen]
    why = NotThisNormError("")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        for shape in dict.fromkeys((*_usual_shapes(width), *real)):
            try:
                return _tried(_random_copy(module), _random_input(shape), width, real)
            except NotThisNormError as error:
                why = error
            except REFUSALS as error:
                why = why if str(why) else NotThisNormError(f"its trial fails ({reason(error)})")
    raise why


def _tried(twin: nn.Module, x: Tensor, width: int | None, real: list[tuple[int, ...]]) -> Form | None:
    """The form of a copy on x, which it must also have in training and at the shapes that it gets in its model."""
    y = twin(x.clone())
    if not isinstance(y, Tensor) or y.shape != x.shape:
        raise NotThisNormError("its output is not a tensor of its input's shape")
    if torch.equal(y, x) and not isinstance(twin, LearnableScaler):
        return None
    bare, after = _split(twin, x)
    form = _matching(bare, x, width)
    for shape in real:
        dim = shape[-1 if form.layout == "last" else 1]
        if dim != form.dim or not _agrees(form, bare, _random_input(shape)):
            raise NotThisNormError(f"it computes something else at inputs of shape {shape}", is_norm=True)
    by_batch = not _agrees(form, bare.train(), x)
    if by_batch and not (form.kind == "batchnorm" and _agrees(form, bare, x, of_batch=True)):
        raise NotThisNormError("it computes something else in training", is_norm=True)
    return replace(form, by_batch=by_batch, after=after)


def _agrees(form: Form, bare: nn.Module, x: Tensor, of_batch: bool = False) -> bool:
    """Whether a module has a form on x."""
    y = form.rows(bare(x.clone()))
    return bool((form.output(bare, x, of_batch) - y).norm() <= _AGREES * y.norm())


def _split(twin: nn.Module, x: Tensor) -> tuple[nn.Module, str | None]:
    """A norm without the modules inside it, and the name of the one through which its output goes; None without."""
    bare, names = copy.deepcopy(twin), [n for n, m in twin.named_children() if not isinstance(m, nn.Identity)]
    for name in names:
        setattr(bare, name, nn.Identity())

    def outputs(module: nn.Module) -> list[Tensor]:
        found = []
        for training in (False, True):
            torch.default_generator.manual_seed(0)
            found.append(copy.deepcopy(module).train(training)(x.clone()))
        return found

    wanted = outputs(twin)
    for name in (None, *names):
        after = nn.Identity() if name is None else twin.get_submodule(name)
        if all(map(torch.allclose, wanted, outputs(nn.Sequential(bare, after)))):
            return bare, name
    raise NotThisNormError(f"it computes something else than a norm followed by {names[0]}")


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
        noise = torch.randn(tensor.shape, generator=generator)
        if not tensor.is_floating_point():
            tensor.zero_()
        elif name.endswith("running_var"):
            # So small that the eps next to it shows.
            tensor.copy_(1e-3 * (0.5 + noise.square()))
        elif isinstance(tensor, nn.Parameter):
            # So large that the bounds of an output show.
            tensor.copy_(0.8 + 2.0 * noise)
        elif empty or tensor.numel() > 1:
            tensor.copy_(0.8 + 0.3 * noise)
    return twin


def _random_input(shape: tuple[int, ...]) -> Tensor:
    """Random values off zero; from the second of the batch on so small that eps shows."""
    x = 0.5 + torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[1:] *= 0.03
    return x


def _usual_shapes(width: int | None) -> list[tuple[int, ...]]:
    """Shapes that norms of a width take, small ones, whose axes differ in size."""
    if width is None:
        return []
    a, b, c = [size for size in (3, 5, 7, 11) if size != width][:3]
    return [(2, a, b, width), (2, width, a, b), (2, width, a), (2, width, a, b, c), (6, width)]


def _matching(bare: nn.Module, x: Tensor, width: int | None) -> Form:
    """The form that a copy without the modules inside it has on x."""
    y = bare(x.clone())
    why = "it computes none of the norms that can be swapped"
    for form in _candidates(bare, x, width):
        moments = Moments()
        moments.add(form.normalised(bare, x), form.rows(y))
        slope, shift = moments.line()
        if not moments.error(slope, shift) < _AGREES:
            continue
        try:
            return _named(bare, form, slope, shift)
        except NotThisNormError as error:
            why = str(error)
    if torch.allclose(bare(-x), y):
        raise NotThisNormError("its output does not depend on its input")
    # Statistics of its input make a module blind to the scale of it.
    raise NotThisNormError(why, is_norm=torch.allclose(bare(2 * x)[0], y[0], rtol=1e-2, atol=1e-2))


def _candidates(bare: nn.Module, x: Tensor, width: int | None) -> Iterator[Form]:
    """Every form that may agree, without its gain and shift, the usual ones first."""
    own = [value for value in vars(bare).values() if isinstance(value, float) and value >= 0.0]
    kinds = ["layernorm", "rmsnorm", "scalenorm", "batchnorm", "groupnorm"]
    if isinstance(bare, LearnableScaler):
        kinds = ["learnable_scaler"]
    elif isinstance(getattr(bare, "alpha", None), Tensor):
        kinds = ["derf", "dyt"] if isinstance(getattr(bare, "shift", None), Tensor) else ["dyt"]
    layouts: dict[Layout, int] = {"last": x.shape[-1], "first": x.shape[1]}
    for kind in kinds:
        for layout, dim in layouts.items():
            if width not in (None, 1, dim) or (layout == "last" and kind in ("batchnorm", "groupnorm")):
                continue
            declared = getattr(bare, "num_groups", None)
            groups = [declared if isinstance(declared, int) else 1, 1, dim] if kind == "groupnorm" else [1]
            for each in dict.fromkeys(groups):
                yield from (Form(kind, dim, layout, eps, each) for eps in dict.fromkeys((*own, *_EPSILONS)))


def _named(bare: nn.Module, form: Form, slope: Tensor, shift: Tensor) -> Form:
    """A form with the names of its gain and shift among the vectors of a copy."""
    used = {"dyt": {"alpha"}, "derf": {"alpha", "shift"}}.get(form.kind, {"running_mean", "running_var"})
    vectors = {n: t.flatten() for n, t in _own(bare).items() if t.numel() in (1, form.dim) and n not in used}

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
    return replace(form, gain=gain[0], one_plus=gain[1], shift=bias[0])
