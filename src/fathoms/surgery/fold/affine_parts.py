"""The affine parts of a traced model: where it multiplies by, or adds, one learned number per channel.

LayerScale, ReZero, SkipInit, LearnableScaler, Fixup's shifts, and the tails of LayerNorm, RMSNorm, DyT and
Derf all look the same here, whoever wrote them: y = weight * x + bias along one axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from fathoms.surgery.fold.graph import Traced, operation, shape_of

_SCALES = {"mul", "mul_"}
_SHIFTS = {"add", "add_"}

# Where each norm keeps its weight and bias among its arguments.
NORM_ARGUMENTS = {
    "layer_norm": (2, 3),
    "rms_norm": (2, None),
    "group_norm": (2, 3),
    "batch_norm": (1, 2),
}


@dataclass(frozen=True)
class Use:
    """One place in the graph where a part acts.

    Args:
        first: The node that multiplies, or adds where nothing multiplies, or the norm.
        last: The node whose value is the part's output; the same as `first` but for a scale with a shift.
        entry: What comes in; None for the tail of a norm, where that is no node of the graph.
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
        uses: Where; parts that share parameters have several.
    """

    weight: str | None
    bias: str | None
    uses: tuple[Use, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)


def _operands(node: fx.Node, traced: Traced) -> tuple[fx.Node, fx.Node] | None:
    """The activation and the parameter of a multiplication or addition of one of each."""
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
    """The one axis along which a parameter varies when it meets x; the last for a single number."""
    rank, shape = len(shape_of(x)), shape_of(parameter)
    if len(shape) > rank:
        return None
    long = [i + rank - len(shape) for i, size in enumerate(shape) if size != 1]
    if not long:
        return rank - 1
    return long[0] if len(long) == 1 and shape_of(x)[long[0]] == shape[long[0] - rank] else None


def _elementwise(node: fx.Node, traced: Traced, kinds: set[str]) -> tuple[fx.Node, str, int] | None:
    if operation(node) not in kinds or not isinstance(node.meta.get("val"), Tensor):
        return None
    operands = _operands(node, traced)
    if operands is None or shape_of(operands[0]) != shape_of(node):
        return None
    axis = _axis(*operands)
    name = traced.source(operands[1])
    return None if axis is None or name is None else (operands[0], name, axis)


def find_parts(traced: Traced) -> list[AffinePart]:
    """Every affine part, in the order in which they first act."""
    found: dict[tuple[str | None, str | None], list[Use]] = {}
    taken: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node in taken:
            continue
        name = operation(node)
        if name in NORM_ARGUMENTS:
            weight, bias = norm_parameters(node, traced)
            if weight or bias:
                axis = len(shape_of(node)) - 1 if name in ("layer_norm", "rms_norm") else 1
                found.setdefault((weight, bias), []).append(Use(node, node, None, axis))
            continue
        scale = _elementwise(node, traced, _SCALES)
        if scale is not None:
            entry, weight, axis = scale
            after = traced.users(node)
            shift = _elementwise(after[0], traced, _SHIFTS) if len(after) == 1 else None
            if shift is not None and shift[0] is node and shift[2] == axis:
                taken.add(after[0])
                found.setdefault((weight, shift[1]), []).append(Use(node, after[0], entry, axis))
            else:
                found.setdefault((weight, None), []).append(Use(node, node, entry, axis))
            continue
        shift = _elementwise(node, traced, _SHIFTS)
        if shift is not None:
            entry, bias, axis = shift
            found.setdefault((None, bias), []).append(Use(node, node, entry, axis))
    return [AffinePart(weight, bias, tuple(uses)) for (weight, bias), uses in found.items()]


def norm_parameters(node: fx.Node, traced: Traced) -> tuple[str | None, str | None]:
    """Names of a norm's weight and bias."""
    places = NORM_ARGUMENTS[operation(node)]
    names = []
    for place in places:
        value = node.args[place] if place is not None and len(node.args) > place else None
        names.append(traced.source(value))
    return names[0], names[1]
