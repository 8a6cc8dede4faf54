"""Find the affine parts of a traced model: one learned number per channel, multiplied or added.

LayerScale, ReZero, SkipInit, LearnableScaler, Fixup's shifts, and the affine tails of LayerNorm, RMSNorm, DyT and
Derf all look the same in the graph, whichever library they come from: y = weight * x + bias along one axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from fathoms.surgery.fold.graph import Traced, operation, shape_of

_SCALES = {"mul", "mul_"}
_SHIFTS = {"add", "add_"}

# Positions of weight and bias among the arguments of each norm.
_NORM_ARGUMENTS = {
    "layer_norm": (2, 3),
    "rms_norm": (2, None),
    "group_norm": (2, 3),
    "batch_norm": (1, 2),
}


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
    """A learned scale, a learned shift, or both, with every place where they act.

    Args:
        weight: Name of the parameter that multiplies, or None.
        bias: Name of the parameter that is added, or None.
        uses: Where it acts; parameters that are shared have several uses.
    """

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
            weight, bias = _norm_parameters(node, traced)
            if weight or bias:
                axis = len(shape_of(node)) - 1 if name in ("layer_norm", "rms_norm") else 1
                found.setdefault((weight, bias), []).append(PartUse(node, node, None, axis))
        elif (scale := _elementwise(node, traced, _SCALES)) is not None:
            entry, weight, axis = scale
            last, bias = _shift_after(node, axis, traced)
            taken.add(last)
            found.setdefault((weight, bias), []).append(PartUse(node, last, entry, axis))
        elif (shift := _elementwise(node, traced, _SHIFTS)) is not None:
            entry, bias, axis = shift
            found.setdefault((None, bias), []).append(PartUse(node, node, entry, axis))
    return [AffinePart(weight, bias, tuple(uses)) for (weight, bias), uses in found.items()]


def _norm_parameters(node: fx.Node, traced: Traced) -> tuple[str | None, str | None]:
    """Names of a norm's weight and bias."""
    names = []
    for place in _NORM_ARGUMENTS[operation(node)]:
        value = node.args[place] if place is not None and len(node.args) > place else None
        names.append(traced.source(value))
    return names[0], names[1]


def _shift_after(scale: fx.Node, axis: int, traced: Traced) -> tuple[fx.Node, str | None]:
    """The addition that follows a scale and nothing else reads, with its parameter; else the scale itself."""
    users = traced.users(scale)
    shift = _elementwise(users[0], traced, _SHIFTS) if len(users) == 1 else None
    if shift is None or shift[0] is not scale or shift[2] != axis:
        return scale, None
    return users[0], shift[1]


def _elementwise(node: fx.Node, traced: Traced, kinds: set[str]) -> tuple[fx.Node, str, int] | None:
    """Input, parameter and channel axis of a multiplication or addition by one number per channel."""
    if operation(node) not in kinds or not isinstance(node.meta.get("val"), Tensor):
        return None
    operands = _operands(node, traced)
    if operands is None or shape_of(operands[0]) != shape_of(node):
        return None
    axis = _axis(*operands)
    name = traced.source(operands[1])
    return None if axis is None or name is None else (operands[0], name, axis)


def _operands(node: fx.Node, traced: Traced) -> tuple[fx.Node, fx.Node] | None:
    """The activation and the parameter of a node that has one of each."""
    if len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = node.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    if traced.source(left) is not None:
        left, right = right, left
    if traced.source(left) is not None or traced.source(right) is None:
        return None
    return left, right


def _axis(x: fx.Node, parameter: fx.Node) -> int | None:
    """The one axis along which a parameter varies when broadcast to x; the last for a single number."""
    rank, shape = len(shape_of(x)), shape_of(parameter)
    if len(shape) > rank:
        return None
    long = [i + rank - len(shape) for i, size in enumerate(shape) if size != 1]
    if not long:
        return rank - 1
    return long[0] if len(long) == 1 and shape_of(x)[long[0]] == shape[long[0] - rank] else None
