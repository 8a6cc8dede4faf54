"""Route an affine part to the matrices, norms or other parts that can absorb it, and absorb it there.

A gain and a shift on the input of W x + c and a scale on its output are the same as

    W' = scale W gain,  c' = scale (c + W shift)

computed here in float64 and rounded once. `training/master_weights.py` evaluates this formula after every update of a
run, in the dtype of training and with the gradients of all five.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from fathoms.surgery.fold_graph import AffinePart, PartUse, Traced, operation, shape_of, through

# Operations with a weight matrix, and the channel axis of their input and output.
_MATRICES = {"linear": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}

_WORDS = {
    "add": "an addition, as the residual stream is",
    "add_": "an addition, as the residual stream is",
    "cat": "a concatenation with other tokens",
    "output": "the model's output",
    "scaled_dot_product_attention": "an attention",
}

# The parts of a graph by the node of their output, with the use that ends there; without those folded already.
PartsByOutput = dict[fx.Node, tuple[AffinePart, PartUse]]
Side = Literal["input", "output"]
Kind = Literal["linear", "conv", "affine"]


@dataclass(frozen=True)
class Target:
    """A matrix, a norm or another part that absorbs a part: its parameters, and the nodes where it acts."""

    kind: Kind
    weight: str | None
    bias: str | None
    nodes: tuple[fx.Node, ...]
    # The constant by which the part's output is multiplied on its way here.
    factor: float
    # Whether the part acts on its input, and its columns change, or on its output, and its rows do.
    side: Side


class NoRouteError(Exception):
    """The reason why a part cannot be folded; the report shows it."""


def route(part: AffinePart, traced: Traced, others: PartsByOutput) -> list[Target]:
    """The targets that absorb a part: those that read its output, or else those that make its input."""
    for name in part.parameters:
        if not part.nodes.issuperset(traced.readers(name)):
            raise NoRouteError(f"{name} is also used elsewhere")
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
                raise NoRouteError(f"its output goes into {_WORDS.get(name, name)}")
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
            raise NoRouteError(f"it comes after {_WORDS.get(name, name)}")
        axes = [k for k in range(len(shape_of(source))) if through(node, source, k) == axis]
        if not axes:
            raise NoRouteError(f"it comes after {_WORDS.get(name, name)}")
        node, axis = source, axes[0]


def _parameters(node: fx.Node, traced: Traced, others: PartsByOutput) -> tuple[Kind, str | None, str | None]:
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
    groups: dict[tuple[Kind, str | None, str | None], list[tuple[fx.Node, float]]] = {}
    for node, factor in ends:
        groups.setdefault(_parameters(node, traced, others), []).append((node, factor))
    targets = []
    for (kind, weight, bias), members in groups.items():
        nodes = tuple(dict.fromkeys(node for node, _ in members))
        # A part that scales and shifts is two nodes.
        acting = {*nodes, *(others[node][1].first for node in nodes if node in others)}
        for name in (weight, bias):
            if name is not None and not acting.issuperset(traced.readers(name)):
                raise NoRouteError(f"{name} is shared with another place")
        factors = {factor for _, factor in members}
        if len(factors) > 1 and part.bias is not None:
            raise NoRouteError(f"{weight} is reached on two ways that scale differently")
        targets.append(Target(kind, weight, bias, nodes, factors.pop(), side))
    return targets


class Weights:
    """A model's parameters by name, and the modules that own them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a parameter, and its attribute there."""
        path, _, attribute = name.rpartition(".")
        return self.model.get_submodule(path), attribute

    def get(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def value(self, name: str | None) -> Tensor | None:
        return None if name is None else self.get(name).detach().to(torch.float64, copy=True)

    @torch.no_grad()
    def put(self, name: str, value: Tensor | float) -> None:
        """Round new numbers into a parameter."""
        own = self.get(name)
        own.copy_(value.reshape(own.shape) if isinstance(value, Tensor) else torch.full_like(own, value))

    def bias_name(self, weight: str) -> str | None:
        """The name of the bias a weight without one could get; None if its owner would not read it."""
        module, attribute = self.owner(weight)
        path = weight.removesuffix(attribute)
        if isinstance(module, nn.MultiheadAttention) and attribute == "in_proj_weight":
            # Its fused inference takes both biases or none.
            return None if module.out_proj.bias is None else f"{path}in_proj_bias"
        own = isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and attribute == "weight"
        return f"{path}bias" if own else None

    def add_bias(self, weight: str, value: Tensor) -> str:
        """Register a bias for a matrix that has none; its name."""
        own, name = self.get(weight), self.bias_name(weight)
        assert name is not None
        module, attribute = self.owner(name)
        module.register_parameter(
            attribute, nn.Parameter(value.to(own.dtype), requires_grad=own.requires_grad)
        )
        return name


def is_neutral(part: AffinePart, weights: Weights) -> bool:
    """Whether a part is all ones and zeros already."""
    values = ((part.weight, 1.0), (part.bias, 0.0))
    return all(name is None or bool((weights.get(name) == value).all()) for name, value in values)


def absorb_permanently(part: AffinePart, targets: list[Target], weights: Weights, traced: Traced) -> None:
    """Move a part into all of its targets, if the arithmetic can, and take it out of the graph."""
    for target in targets:
        _check(part, target, weights)
    for target in targets:
        made = _absorb_into(part, target, weights)
        if made is not None:
            _show_bias(target, made, traced)
    for name, neutral in ((part.weight, 1.0), (part.bias, 0.0)):
        if name is not None:
            weights.put(name, neutral)
    _take_out(part, traced)


def _check(part: AffinePart, target: Target, weights: Weights) -> None:
    """Refuse what the arithmetic cannot do."""
    if target.kind == "affine":
        most = max(weights.get(name).numel() for name in part.parameters)
        for name in (target.weight, target.bias):
            if name is not None and weights.get(name).numel() < most:
                raise NoRouteError(f"{name} is one number for all channels")
        if target.weight is None and part.weight is not None:
            raise NoRouteError(f"{target.bias} has no scale next to it")
        if target.bias is None and part.bias is not None:
            raise NoRouteError(f"{target.weight} has no shift next to it")
        return
    assert target.weight is not None
    own = [size for size in weights.get(target.weight).shape if size > 1]
    used: list[Any] = [node.args[1] for node in target.nodes]
    if any([size for size in shape_of(each) if size > 1] != own for each in used):
        raise NoRouteError(f"{target.weight} is used in another shape than it has")
    if part.bias is None:
        return
    if target.bias is None and weights.bias_name(target.weight) is None:
        raise NoRouteError(f"{target.weight} has no bias, and no place for one")
    pads = [_conv_argument(node, 4, 0) for node in target.nodes] if target.kind == "conv" else []
    each = [size for pad in pads for size in (pad if isinstance(pad, list | tuple) else [pad])]
    if target.side == "input" and any(size not in (0, "valid") for size in each):
        raise NoRouteError(f"{target.weight} pads with zeros, which a shift would have to change too")


def _conv_argument(node: Any, place: int, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else default


def _absorb_into(part: AffinePart, target: Target, weights: Weights) -> str | None:
    """Absorb a part into one target; the name of the bias that had to be made for it, or None."""
    vectors = [weights.value(name) for name in (part.weight, part.bias, target.bias)]
    gain, shift, bias = (None if vector is None else vector.flatten() for vector in vectors)
    weight: Any = weights.value(target.weight)
    name: Any = target.weight
    if target.side == "output":
        bias = bias if bias is None or gain is None else bias * gain
    else:
        if shift is not None:
            # Each output sums the shift times its weights over every pixel of the kernel.
            columns = weight.flatten(2).sum(2) if weight.ndim > 2 else weight
            shift = target.factor * (columns * _by_column(shift, target, weight)).sum(1)
        gain = None if gain is None else _by_column(gain, target, weight)
    if weight is not None and gain is not None:
        weight = weight.flatten() if target.kind == "affine" else weight
        weights.put(name, weight * gain.reshape(*gain.shape, *[1] * (weight.ndim - gain.ndim)))
    if shift is not None:
        bias = shift.expand(len(weight)) if bias is None else bias + shift
    if bias is None:
        return None
    if target.bias is not None:
        weights.put(target.bias, bias)
        return None
    return weights.add_bias(name, bias)


def _by_column(values: Tensor, target: Target, weight: Tensor) -> Tensor:
    """One value for each row and column of a weight: its rows read the channels of their own group only."""
    groups = _conv_argument(target.nodes[0], 6, 1) if target.kind == "conv" else 1
    own = values.expand(groups * weight.shape[1]).reshape(groups, 1, -1)
    return own.expand(-1, len(weight) // groups, -1).flatten(0, 1)


def _show_bias(target: Target, name: str, traced: Traced) -> None:
    """Show in the graph that a matrix has a bias now, for the next part that it absorbs."""
    with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
        placeholder = traced.graph.placeholder(name.replace(".", "_"))
    weight = target.nodes[0].args[1].meta["val"]  # pyrefly: ignore
    placeholder.meta["val"] = weight.new_empty(len(weight))
    traced.sources[placeholder] = name
    for node in target.nodes:
        node.args = (*node.args[:2], placeholder, *node.args[3:])


def _take_out(part: AffinePart, traced: Traced) -> None:
    """Rewrite the graph as if the part had never been there."""
    for use in part.uses:
        if use.entry is None:
            own = part.parameters
            use.first.args = tuple(None if traced.source(n) in own else n for n in use.first.args)
            continue
        use.last.replace_all_uses_with(use.entry)
        for node in dict.fromkeys((use.last, use.first)):
            for user in list(node.users):
                traced.graph.erase_node(user)
            traced.graph.erase_node(node)
