"""Absorb a scale and a shift into a matrix, a convolution or another affine part.

A gain and a shift on the input of W x + c and a scale on its output are the same as

    W' = scale W gain,  c' = scale (c + W shift)

computed here in float64 and rounded once. `train/precision/absorb_affine.py` evaluates this formula after every
update of a run, in the dtype of training and with the gradients of all five.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fathoms.surgery.fold.affine_parts import AffinePart
from fathoms.surgery.fold.graph import Traced
from fathoms.surgery.fold.targets import NoRouteError, Target


class Weights:
    """A model's parameters by name, and the modules that own them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a parameter, and its attribute there."""
        path, _, attribute = name.rpartition(".")
        return self.model.get_submodule(path), attribute

    def get(self, name: str) -> nn.Parameter:
        """A parameter."""
        return self.model.get_parameter(name)

    def value(self, name: str | None) -> Tensor | None:
        """A copy of a parameter's numbers in float64."""
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
            return f"{path}in_proj_bias"
        own = isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and attribute == "weight"
        return f"{path}bias" if own else None

    def add_bias(self, name: str, value: Tensor, like: str) -> None:
        """Register a bias for a matrix that has none."""
        module, attribute = self.owner(name)
        weight = self.get(like)
        bias = nn.Parameter(value.to(weight.dtype), requires_grad=weight.requires_grad)
        module.register_parameter(attribute, bias)


def is_neutral(part: AffinePart, weights: Weights) -> bool:
    """Whether a part is all ones and zeros already."""
    values = ((part.weight, 1.0), (part.bias, 0.0))
    return all(name is None or bool((weights.get(name) == value).all()) for name, value in values)


def absorb_permanently(part: AffinePart, targets: list[Target], weights: Weights, traced: Traced) -> None:
    """Move a part into all of its targets, and take it out of the graph.

    Its parameters become ones and zeros. What the arithmetic cannot do is refused before anything has changed.
    """
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
    if target.kind == "conv":
        _check_convolution(part, target)
    if target.kind == "affine":
        _check_affine(part, target, weights)
    elif part.bias is not None and target.bias is None and weights.bias_name(target.weight or "") is None:
        raise NoRouteError(f"{target.weight} has no bias, and no place for one")


def _check_convolution(part: AffinePart, target: Target) -> None:
    for node in target.nodes:
        groups = _conv_argument(node, 6, 1)
        if groups != 1:
            raise NoRouteError(f"{target.weight} is a convolution in {groups} groups")
        if target.side == "input" and part.bias is not None and _padded(node):
            raise NoRouteError(f"{target.weight} pads with zeros, which a shift would have to change too")


def _check_affine(part: AffinePart, target: Target, weights: Weights) -> None:
    sizes = [weights.get(name).numel() for name in part.parameters]
    for name in (target.weight, target.bias):
        if name is not None and weights.get(name).numel() < max(sizes):
            raise NoRouteError(f"{name} is one number for all channels")
    if target.weight is None and part.weight is not None:
        raise NoRouteError(f"{target.bias} has no scale next to it")
    if target.bias is None and part.bias is not None:
        raise NoRouteError(f"{target.weight} has no shift next to it")


def _conv_argument(node: Any, place: int, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else default


def _padded(node: Any) -> bool:
    padding = _conv_argument(node, 4, 0)
    values = [padding] if isinstance(padding, int | str) else padding
    return any(value not in (0, "valid") for value in values)


def _absorb_into(part: AffinePart, target: Target, weights: Weights) -> str | None:
    """Absorb a part into one target; the name of the bias that had to be made for it, or None."""
    scale, shift = weights.value(part.weight), weights.value(part.bias)
    weight, bias = weights.value(target.weight), weights.value(target.bias)
    scale = None if scale is None else scale.flatten()
    shift = None if shift is None else shift.flatten()
    if target.side == "input":
        assert weight is not None
        assert target.weight is not None
        if shift is not None:
            # Each output sums the shift times its weights over every pixel of the kernel.
            columns = weight.flatten(2).sum(2) if weight.ndim > 2 else weight
            extra = target.factor * (columns @ shift.expand(columns.shape[1]))
            bias = extra if bias is None else bias + extra
        if scale is not None:
            weights.put(target.weight, weight * scale.reshape(1, -1, *[1] * (weight.ndim - 2)))
    else:
        if scale is not None and weight is not None and target.weight is not None:
            weights.put(target.weight, weight * scale.reshape(-1, *[1] * (weight.ndim - 1)))
        if bias is not None and scale is not None:
            bias = bias * scale
        if shift is not None:
            size = bias.shape if bias is not None else weight.shape[:1] if weight is not None else shift.shape
            bias = shift.expand(size) if bias is None else bias + shift
    if bias is None:
        return None
    if target.bias is not None:
        weights.put(target.bias, bias)
        return None
    assert target.weight is not None
    made = weights.bias_name(target.weight)
    assert made is not None
    weights.add_bias(made, bias, target.weight)
    return made


def _show_bias(target: Target, name: str, traced: Traced) -> None:
    """Show in the graph that a matrix has a bias now, for the next part that it absorbs."""
    first = next(iter(traced.graph.nodes))
    with traced.graph.inserting_before(first):
        placeholder = traced.graph.placeholder(name.replace(".", "_"))
    weight = target.nodes[0].args[1]
    placeholder.meta["val"] = weight.meta["val"].new_empty(weight.meta["val"].shape[0])  # pyrefly: ignore
    traced.sources[placeholder] = name
    for node in target.nodes:
        node.args = (*node.args[:2], placeholder, *node.args[3:])


def _take_out(part: AffinePart, traced: Traced) -> None:
    """Rewrite the graph as if the part had never been there."""
    for use in part.uses:
        if use.entry is None:
            arguments = [
                None if traced.source(value) in part.parameters else value for value in use.first.args
            ]
            use.first.args = tuple(arguments)
            continue
        use.last.replace_all_uses_with(use.entry)
        for node in dict.fromkeys((use.last, use.first)):
            for user in list(node.users):
                traced.graph.erase_node(user)
            traced.graph.erase_node(node)
