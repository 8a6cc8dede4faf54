"""Route an affine part to the matrices, norms or other parts that can absorb it, or refuse with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from fathoms.surgery.fold.affine_parts import AffinePart, PartUse
from fathoms.surgery.fold.channel_axis import through
from fathoms.surgery.fold.graph import Traced, operation, shape_of

# Operations with a weight matrix, and the channel axis of their input and output.
_MATRICES = {"linear": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}

_WORDS = {
    "add": "an addition, as the residual stream is",
    "add_": "an addition, as the residual stream is",
    "cat": "a concatenation with other tokens",
    "output": "the model's output",
    "scaled_dot_product_attention": "an attention",
}

# The parts of a graph by the node of their output, with the use that ends there.
PartsByOutput = dict[fx.Node, tuple[AffinePart, PartUse]]
Side = Literal["input", "output"]


@dataclass(frozen=True)
class Target:
    """A matrix, a norm or another part that absorbs a part.

    Args:
        kind: The kind of operation.
        weight: Name of its weight; None for a part that only adds.
        bias: Name of its bias, or None if it has none yet.
        nodes: Where it acts.
        factor: The constant by which the part's output is multiplied on its way here.
        side: Whether the part acts on the target's input (its columns change) or output (its rows).
    """

    kind: Literal["linear", "conv", "affine"]
    weight: str | None
    bias: str | None
    nodes: tuple[fx.Node, ...]
    factor: float
    side: Side


class NoRouteError(Exception):
    """The reason why a part cannot be folded; the report shows it."""


def by_output(parts: list[AffinePart]) -> PartsByOutput:
    """The index that `route` looks parts up in; a part that is folded must be taken out of it."""
    return {use.last: (part, use) for part in parts for use in part.uses}


def route(part: AffinePart, traced: Traced, others: PartsByOutput) -> list[Target]:
    """The targets that absorb a part: those that read its output, or else those that make its input."""
    _refuse_other_readers(part, traced)
    try:
        return _grouped(part, _ahead(part, traced), traced, others, "input")
    except NoRouteError as ahead:
        if any(use.entry is None for use in part.uses):
            raise
        try:
            ends = [(_producer(use, traced, others), 1.0) for use in part.uses]
            return _grouped(part, ends, traced, others, "output")
        except NoRouteError as back:
            raise NoRouteError(f"{ahead}; {back}") from None


def _refuse_other_readers(part: AffinePart, traced: Traced) -> None:
    own = part.nodes
    for name in part.parameters:
        if any(reader not in own for reader in traced.readers(name)):
            raise NoRouteError(f"{name} is also used elsewhere")


def _describe(name: str) -> str:
    return _WORDS.get(name, name)


def _ahead(part: AffinePart, traced: Traced) -> list[tuple[fx.Node, float]]:
    """The matrices that read a part's outputs, each with its factor; any other reader is a refusal."""
    found = []
    waiting = [(use.last, use.axis, 1.0) for use in part.uses]
    while waiting:
        node, axis, factor = waiting.pop()
        for user in traced.users(node):
            name = operation(user)
            if name in _MATRICES and user.args[0] is node and axis == _MATRICES[name] % len(shape_of(node)):
                found.append((user, factor))
                continue
            constant = user.args[1] if name in ("mul", "div") and len(user.args) == 2 else None
            if isinstance(constant, int | float) and user.args[0] is node:
                waiting.append((user, axis, factor * (constant if name == "mul" else 1.0 / constant)))
                continue
            moved = through(user, node, axis)
            if moved is None:
                raise NoRouteError(f"its output goes into {_describe(name)}")
            waiting.append((user, moved, factor))
    if not found:
        raise NoRouteError("nothing reads its output")
    return found


def _producer(use: PartUse, traced: Traced, others: PartsByOutput) -> fx.Node:
    """The matrix, norm or part whose output goes into a part and nowhere else."""
    node, axis = use.entry, use.axis
    assert node is not None
    while True:
        if len(traced.users(node)) != 1:
            raise NoRouteError("its input is also used elsewhere")
        name = operation(node)
        rank = len(shape_of(node))
        if name in _MATRICES and axis == _MATRICES[name] % rank:
            return node
        if node in others and others[node][1].axis == axis:
            return node
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not hasattr(source.meta.get("val"), "shape"):
            raise NoRouteError(f"it comes after {_describe(name)}")
        axes = [k for k in range(len(shape_of(source))) if through(node, source, k) == axis]
        if not axes:
            raise NoRouteError(f"it comes after {_describe(name)}")
        node, axis = source, axes[0]


def _parameters(
    node: fx.Node, traced: Traced, others: PartsByOutput
) -> tuple[Literal["linear", "conv", "affine"], str | None, str | None]:
    """Kind, weight and bias of a target."""
    if node in others:
        part, _ = others[node]
        return "affine", part.weight, part.bias
    name = operation(node)
    weight = traced.source(node.args[1])
    given = node.args[2] if len(node.args) > 2 else None
    bias = traced.source(given)
    if weight is None or (given is not None and bias is None):
        raise NoRouteError(f"a {name} there computes its weight or bias from others")
    return ("linear" if name == "linear" else "conv"), weight, bias


def _grouped(
    part: AffinePart, ends: list[tuple[fx.Node, float]], traced: Traced, others: PartsByOutput, side: Side
) -> list[Target]:
    """One target for each matrix, norm or part, all of whose uses must be among `ends`."""
    groups: dict[tuple[Literal["linear", "conv", "affine"], str | None, str | None], list] = {}
    for node, factor in ends:
        groups.setdefault(_parameters(node, traced, others), []).append((node, factor))
    targets = []
    for (kind, weight, bias), members in groups.items():
        nodes = {node for node, _ in members}
        # A part that scales and shifts is two nodes.
        nodes |= {others[node][1].first for node in nodes if node in others}
        for name in (weight, bias):
            if name is not None and any(reader not in nodes for reader in traced.readers(name)):
                raise NoRouteError(f"{name} is shared with another place")
        factors = {factor for _, factor in members}
        if len(factors) > 1 and part.bias is not None:
            raise NoRouteError(f"{weight} is reached on two ways that scale differently")
        nodes_in_order = tuple(dict.fromkeys(node for node, _ in members))
        targets.append(Target(kind, weight, bias, nodes_in_order, factors.pop(), side))
    return targets
