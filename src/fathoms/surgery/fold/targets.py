"""Into which matrices an affine part can be folded, or why into none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from fathoms.surgery.fold.affine_parts import NORM_ARGUMENTS, AffinePart, Use, find_parts, norm_parameters
from fathoms.surgery.fold.channel_axis import through
from fathoms.surgery.fold.graph import Traced, operation, shape_of

_MATRICES = {"linear": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}

_WORDS = {
    "add": "an addition, as the residual stream is",
    "add_": "an addition, as the residual stream is",
    "cat": "a concatenation with other tokens",
    "output": "the model's output",
    "scaled_dot_product_attention": "an attention",
}


@dataclass(frozen=True)
class Target:
    """A matrix, a norm or another part that takes a part in.

    Args:
        kind: What it is.
        weight: Name of its weight; None for a part that only adds.
        bias: Name of its bias, or None if it has none yet.
        nodes: Where it acts.
        factor: By how much what comes in was multiplied on its way here.
        side: Whether the part stands behind it (then its rows change) or before it (its columns).
    """

    kind: Literal["linear", "conv", "affine"]
    weight: str | None
    bias: str | None
    nodes: tuple[fx.Node, ...]
    factor: float
    side: Literal["behind", "before"]


class NoRouteError(Exception):
    """Why a part cannot be folded; caught by whoever asked."""


def routes(part: AffinePart, traced: Traced) -> list[Target]:
    """The targets into which a part folds, into those after it or else into those before it."""
    _refuse_other_readers(part, traced)
    try:
        return _grouped(part, _ahead(part, traced), traced, "before")
    except NoRouteError as ahead:
        if any(use.entry is None for use in part.uses):
            raise
        try:
            return _grouped(part, _back(part, traced), traced, "behind")
        except NoRouteError as back:
            raise NoRouteError(f"{ahead}; {back}") from None


def _refuse_other_readers(part: AffinePart, traced: Traced) -> None:
    own = {node for use in part.uses for node in (use.first, use.last)}
    for name in part.parameters:
        if any(reader not in own for reader in traced.readers(name)):
            raise NoRouteError(f"{name} is also used elsewhere")


def _says(name: str) -> str:
    return _WORDS.get(name, name)


def _ahead(part: AffinePart, traced: Traced) -> list[tuple[fx.Node, float]]:
    """The matrices that read a part's outputs, and nothing else does."""
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
                raise NoRouteError(f"its output goes into {_says(name)}")
            waiting.append((user, moved, factor))
    if not found:
        raise NoRouteError("nothing reads its output")
    return found


def _back(part: AffinePart, traced: Traced) -> list[tuple[fx.Node, float]]:
    """The matrices, norms or parts whose outputs go into a part, and nowhere else."""
    ends = {use.last: use for other in find_parts(traced) for use in other.uses}
    return [(_producer(use, traced, ends), 1.0) for use in part.uses]


def _producer(use: Use, traced: Traced, ends: dict[fx.Node, Use]) -> fx.Node:
    node, axis = use.entry, use.axis
    assert node is not None
    while True:
        if len(traced.users(node)) != 1:
            raise NoRouteError("what comes in is also used elsewhere")
        name = operation(node)
        rank = len(shape_of(node))
        if name in _MATRICES and axis == _MATRICES[name] % rank:
            return node
        if node in ends and ends[node].axis == axis:
            return node
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not hasattr(source.meta.get("val"), "shape"):
            raise NoRouteError(f"it stands behind {_says(name)}")
        axes = [k for k in range(len(shape_of(source))) if through(node, source, k) == axis]
        if not axes:
            raise NoRouteError(f"it stands behind {_says(name)}")
        node, axis = source, axes[0]


def _parameters(node: fx.Node, traced: Traced) -> tuple[str, str | None, str | None]:
    """Kind, weight and bias of a target."""
    name = operation(node)
    if name in _MATRICES:
        weight = traced.source(node.args[1])
        given = node.args[2] if len(node.args) > 2 else None
        bias = traced.source(given)
        if weight is None or (given is not None and bias is None):
            raise NoRouteError(f"a {name} there computes its weight or bias from others")
        return ("linear" if name == "linear" else "conv"), weight, bias
    if name in NORM_ARGUMENTS:
        weight, bias = norm_parameters(node, traced)
        return "affine", weight, bias
    for part in find_parts(traced):
        if any(use.last is node for use in part.uses):
            return "affine", part.weight, part.bias
    raise NoRouteError(f"it stands behind {_says(name)}")


def _readers(node: fx.Node, traced: Traced) -> set[fx.Node]:
    """The nodes that make up a target: one, or two for a part that scales and shifts."""
    for part in find_parts(traced) if operation(node) not in _MATRICES else ():
        for use in part.uses:
            if use.last is node:
                return {use.first, use.last}
    return {node}


def _grouped(
    part: AffinePart, ends: list[tuple[fx.Node, float]], traced: Traced, side: Literal["behind", "before"]
) -> list[Target]:
    """One target for each matrix, all of whose uses must be among `ends`."""
    groups: dict[tuple[str, str | None, str | None], list[tuple[fx.Node, float]]] = {}
    for node, factor in ends:
        groups.setdefault(_parameters(node, traced), []).append((node, factor))
    targets = []
    for (kind, weight, bias), members in groups.items():
        nodes = {reader for node, _ in members for reader in _readers(node, traced)}
        for name in (weight, bias):
            if name is not None and any(reader not in nodes for reader in traced.readers(name)):
                raise NoRouteError(f"{name} is shared with another place")
        factors = {factor for _, factor in members}
        if len(factors) > 1 and part.bias is not None:
            raise NoRouteError(f"{weight} is reached on two ways that scale differently")
        nodes_in_order = tuple(dict.fromkeys(node for node, _ in members))
        targets.append(Target(kind, weight, bias, nodes_in_order, factors.pop(), side))  # pyrefly: ignore
    return targets
