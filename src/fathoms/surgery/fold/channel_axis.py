"""Follow a channel axis through operations that treat every channel alike.

An operation that only moves, drops, copies or averages whole vectors of channels commutes with a map that acts on
each channel alone. This file lists those operations, and where each puts the channel axis.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from fathoms.surgery.fold.graph import operation, shape_of

_SAME = {"to", "_to_copy", "contiguous", "clone", "detach", "alias", "dropout", "expand", "lift_fresh_copy"}
_VIEWS = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"}
_PIECES = {"slice", "narrow", "index_select", "split", "split_with_sizes", "chunk", "unbind", "select"}


def _argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[place] if len(node.args) > place else default


def _view_axis(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> int | None:
    """Where a reshape puts a channel axis: the axis of the same length with as many elements after it."""
    inner = math.prod(before[axis + 1 :])
    for place, size in enumerate(after):
        if size == before[axis] and math.prod(after[place + 1 :]) == inner:
            return place
    return None


def _after_permute(node: fx.Node, rank: int, axis: int) -> int:
    if operation(node) == "permute":
        order = [old % rank for old in node.args[1]]  # pyrefly: ignore
        return order.index(axis)
    if operation(node) == "movedim":
        probe = list(range(rank))
        start, end = node.args[1], node.args[2]
        if isinstance(start, int) and isinstance(end, int):
            probe.insert(end % rank, probe.pop(start % rank))
            return probe.index(axis)
        return -1
    swapped: Any = (0, 1) if operation(node) == "t" else node.args[1:3]
    first, second = swapped[0] % rank, swapped[1] % rank
    return {first: second, second: first}.get(axis, axis)


def _after_cut(node: fx.Node, rank: int, axis: int) -> int | None:
    name = operation(node)
    place = 2 if name in ("split", "split_with_sizes", "chunk") else 1
    cut = int(_argument(node, place, "dim", 0)) % rank
    if cut == axis:
        return None
    return axis - 1 if name in ("select", "unbind") and cut < axis else axis


def _after_mean(node: fx.Node, rank: int, axis: int) -> int | None:
    dims = _argument(node, 1, "dim", None)
    if dims is None:
        return None
    gone = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    if axis in gone:
        return None
    kept = bool(_argument(node, 2, "keepdim", False))
    return axis if kept else axis - sum(dim < axis for dim in gone)


def through(node: fx.Node, source: fx.Node, axis: int) -> int | None:
    """The channel axis after `node`, given that of its input `source`; None if it mixes channels."""
    name = operation(node)
    if name == "getitem":
        return axis
    if not node.args or node.args[0] is not source:
        return None
    before = shape_of(source) if "val" in source.meta and hasattr(source.meta["val"], "shape") else None
    if before is None:
        return None
    rank = len(before)
    if name == "dropout":
        return None if node.args[2] else axis
    if name in _SAME:
        grown = len(shape_of(node)) - rank
        return axis + grown
    if name in ("permute", "transpose", "t", "movedim"):
        moved = _after_permute(node, rank, axis)
        return None if moved < 0 else moved
    if name in _VIEWS:
        return _view_axis(before, shape_of(node), axis)
    if name in _PIECES:
        return _after_cut(node, rank, axis)
    return _after_mean(node, rank, axis) if name == "mean" else None
