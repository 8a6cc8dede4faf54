"""Trace one forward pass into a graph whose inputs are the named parameters, and find the affine parts in it.

LayerScale, ReZero, SkipInit, LearnableScaler, Fixup's shifts, and the affine tails of LayerNorm, RMSNorm, DyT and
Derf all look the same in the graph, whichever library they come from: y = weight * x + bias along one axis.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fathoms.errors import FathomsError, reason
from fathoms.parts.attention import ClassAttention
from fathoms.parts.norms import Derf, DyT
from fathoms.surgery.accelerate import InPlaceOf
from fathoms.surgery.inputs import Inputs, call, mapped, tensors

# Operations on a parameter that change its shape or dtype and none of its numbers.
_RESHAPES = {"view", "reshape", "unsqueeze", "squeeze", "to", "_to_copy", "alias", "detach", "clone"}


def operation(node: fx.Node) -> str:
    """The name of a node's operation, such as "linear", or "output"."""
    target = node.target
    if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return getattr(target, "__name__", str(target)) if node.op == "call_function" else node.op


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's value."""
    return tuple(node.meta["val"].shape)


@dataclass(frozen=True)
class Traced:
    """A forward pass as a graph, which folding rewrites, and the names of the nodes that are parameters or views."""

    graph: fx.Graph
    sources: dict[fx.Node, str]

    def source(self, node: Any) -> str | None:
        """The parameter that an argument is, or None if it is something else."""
        return self.sources.get(node) if isinstance(node, fx.Node) else None

    def users(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that read a node, without those that only assert something about it."""
        return [user for user in node.users if not operation(user).startswith("_assert")]

    def readers(self, parameter: str) -> Iterator[fx.Node]:
        """Every node that computes with a parameter."""
        for node, name in self.sources.items():
            if name == parameter:
                yield from (user for user in self.users(node) if user not in self.sources)


@torch.no_grad()
def trace(model: nn.Module, images: Inputs) -> Traced:
    """Record a model's forward pass in inference on `images`.

    A model whose parameters are tied has one input for each parameter, not for each of its names.
    """
    # functional_call leaves its inputs in a module that has two names, so it gets a copy.
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ClassAttention | InPlaceOf) and hasattr(module, "impl"):
            # A kernel that reads the weights itself leaves no linear in the graph for a scale to go into.
            module.impl = "reference"  # pyrefly: ignore
    parameters = dict(model.named_parameters())

    def forward(weights: dict[str, Tensor], batch: list[Tensor]) -> list[Tensor]:
        waiting = iter(batch)
        given = mapped(images, lambda _: next(waiting))
        return call(lambda *args, **named: torch.func.functional_call(model, weights, args, named), given)

    # torch's multi-head attention has a fused path in inference that hides its linears.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        tracer = make_fx(
            forward,
            decomposition_table={torch.ops.aten.addcmul.default: _scale_then_add},
            tracing_mode="fake",
            pre_dispatch=True,
            _allow_non_fake_inputs=True,
        )
        module = tracer(parameters, tensors(images))
    except FathomsError:
        raise
    except Exception as error:
        raise FathomsError(
            f"{type(model).__name__}: its forward pass cannot be traced ({reason(error)}); fold the part of it "
            "that can be, such as its backbone"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return Traced(module.graph, _sources(module.graph, list(parameters), _inside_curves(model)))


def _scale_then_add(x: Tensor, scale: Tensor, branch: Tensor, *, value: float = 1) -> Tensor:
    """A fused scale and add as the two operations that folding looks for."""
    return x + scale * branch if value == 1 else x + value * (scale * branch)


def _inside_curves(model: nn.Module) -> set[str]:
    """The slope and shift inside each DyT's or Derf's curve: not scales of channels, and not for folding."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, DyT | Derf)
        for name in ("alpha", "shift")
    }


def _sources(graph: fx.Graph, names: list[str], without: set[str]) -> dict[fx.Node, str]:
    """The parameter's name for each node that is one, or a view of one."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    sources = {node: name for node, name in zip(inputs, names, strict=False) if name not in without}
    for node in graph.nodes:
        if operation(node) in _RESHAPES and node.args and node.args[0] in sources:
            sources[node] = sources[node.args[0]]
    return sources


# Operations that change no number, and those that move, cut or average whole vectors of channels. All of them commute
# with a map of each channel, if the channels stay an axis of their own.
_SAME = {"to", "_to_copy", "contiguous", "clone", "detach", "alias", "expand", "lift_fresh_copy"}
_MOVES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "permute"}
_MOVES |= {"transpose", "t", "movedim", "slice", "narrow", "index_select", "split", "split_with_sizes"}
_MOVES |= {"chunk", "unbind", "select", "mean", "roll", "flip"}


def through(node: fx.Node, source: fx.Node, axis: int) -> int | None:
    """The channel axis after `node`, given that of its input `source`; None if it mixes channels.

    A trial shows it: the numbers of the channels, alike in all other places, must all be in order along one axis.
    """
    name = operation(node)
    if name == "getitem":
        return axis
    if not node.args or node.args[0] is not source or not isinstance(source.meta.get("val"), Tensor):
        return None
    shape = shape_of(source)
    if name == "dropout":
        return None if node.args[2] else axis
    if name in _SAME:
        return axis + len(shape_of(node)) - len(shape)
    if name not in _MOVES or shape[axis] == 1:
        return None
    numbers = torch.arange(shape[axis], dtype=torch.float64)
    others = fx.node.map_arg((node.args[1:], node.kwargs), _zeros)
    found = node.target(_along(numbers, shape, axis).contiguous(), *others[0], **others[1])  # pyrefly: ignore
    found = found if isinstance(found, Tensor) else found[0]
    for place, size in enumerate(found.shape):
        if size == shape[axis] and torch.allclose(
            found.double(), _along(numbers, found.shape, place), atol=0.1
        ):
            return place
    return None


def _zeros(node: fx.Node) -> Tensor:
    """In place of an argument that the graph computes, such as the index of a choice."""
    return torch.zeros(shape_of(node), dtype=node.meta["val"].dtype)


def _along(numbers: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    return numbers.view(-1, *[1] * (len(shape) - axis - 1)).expand(tuple(shape))


_SCALES = {"mul", "mul_"}
_SHIFTS = {"add", "add_"}

# Positions of weight and bias among the arguments of each norm; the third of rms_norm is a number.
_NORM_ARGUMENTS = {"layer_norm": (2, 3), "rms_norm": (2, 3), "group_norm": (2, 3), "batch_norm": (1, 2)}


@dataclass(frozen=True)
class PartUse:
    """One place in the graph where an affine part acts.

    Args:
        first: The node that multiplies, or adds where nothing multiplies, or the norm.
        last: The node whose value is the part's output; differs from `first` for a scale with a shift.
        entry: The input node; None for the tail of a norm, whose input is inside the norm's node.
        axis: The channel axis of the output.
    """

    first: fx.Node
    last: fx.Node
    entry: fx.Node | None
    axis: int


@dataclass(frozen=True)
class AffinePart:
    """A learned scale, a learned shift, or both, by name, with every place where they act."""

    weight: str | None
    bias: str | None
    uses: tuple[PartUse, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def nodes(self) -> set[fx.Node]:
        """Every node that computes the part."""
        return {node for use in self.uses for node in (use.first, use.last)}


def find_parts(traced: Traced) -> list[AffinePart]:
    """Every affine part, in the order in which they first act."""
    found: dict[tuple[str | None, str | None], list[PartUse]] = {}
    taken: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node in taken:
            continue
        name = operation(node)
        if name in _NORM_ARGUMENTS:
            axis = len(shape_of(node)) - 1 if name in ("layer_norm", "rms_norm") else 1
            given = [node.args[k] if k < len(node.args) else None for k in _NORM_ARGUMENTS[name]]
            if any(names := (traced.source(given[0]), traced.source(given[1]))):
                found.setdefault(names, []).append(PartUse(node, node, None, axis))
        elif (scale := _elementwise(node, traced, _SCALES)) is not None:
            (entry, weight, axis), last, bias = scale, node, None
            # The addition that follows a scale and nothing else reads is of the same part.
            readers = traced.users(node)
            shift = _elementwise(readers[0], traced, _SHIFTS) if len(readers) == 1 else None
            if shift is not None and (shift[0], shift[2]) == (node, axis):
                last, bias = readers[0], shift[1]
            taken.add(last)
            found.setdefault((weight, bias), []).append(PartUse(node, last, entry, axis))
        elif (shift := _elementwise(node, traced, _SHIFTS)) is not None:
            entry, bias, axis = shift
            found.setdefault((None, bias), []).append(PartUse(node, node, entry, axis))
    return [AffinePart(weight, bias, tuple(uses)) for (weight, bias), uses in found.items()]


def computed_scales(traced: Traced) -> list[str]:
    """Parameters that multiply after a number was added to them, as the gains 1 + weight of Gemma."""
    factors = [arg for node in traced.graph.nodes if operation(node) in _SCALES for arg in node.args]
    sums = [node for node in factors if isinstance(node, fx.Node) and operation(node) == "add"]
    names = [traced.source(node.args[0]) for node in sums if isinstance(node.args[1], int | float)]
    return [name for name in dict.fromkeys(names) if name is not None]


def _elementwise(node: fx.Node, traced: Traced, kinds: set[str]) -> tuple[fx.Node, str, int] | None:
    """Input, parameter and channel axis of a multiplication or addition by one number per channel."""
    plain = operation(node) in kinds and isinstance(node.meta.get("val"), Tensor)
    if not plain or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    for x, parameter in (node.args, node.args[::-1]):
        name = traced.source(parameter)
        if name is not None and isinstance(x, fx.Node) and traced.source(x) is None:
            axis = _axis(shape_of(x), shape_of(parameter))  # pyrefly: ignore
            return None if axis is None or shape_of(x) != shape_of(node) else (x, name, axis)
    return None


def _axis(whole: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """The one axis along which a parameter varies when broadcast to an input; the last for a single number."""
    rank = len(whole)
    long = [place + rank - len(shape) for place, size in enumerate(shape) if size != 1]
    if len(shape) > rank or len(long) > 1:
        return None
    return long[0] if long else rank - 1
