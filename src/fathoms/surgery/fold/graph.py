"""Trace one forward pass into a graph of torch operations whose inputs are the model's named parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fathoms.errors import FathomsError
from fathoms.parts.attentions.attention import ClassAttention
from fathoms.parts.norms.dyt import Derf, DyT
from fathoms.surgery.accelerate.modules import InPlaceOf
from fathoms.surgery.inputs import output_tensors

# Operations on a parameter that change its shape or dtype and none of its numbers.
_RESHAPES = {
    "view",
    "reshape",
    "unsqueeze",
    "to",
    "_to_copy",
    "alias",
    "detach",
    "squeeze",
    "clone",
}


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
    """A graph, and the model's parameters in it.

    Args:
        graph: The forward pass; folding rewrites it as it proceeds.
        sources: The parameter's name for each node that is one, or a view of one.
    """

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
def trace(model: nn.Module, images: Tensor) -> Traced:
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

    def forward(weights: dict[str, Tensor], batch: Tensor) -> list[Tensor]:
        return output_tensors(torch.func.functional_call(model, weights, (batch,)))

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
        module = tracer(parameters, images)
    except FathomsError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FathomsError(
            f"{type(model).__name__}: its forward pass cannot be traced ({reason}); pass images= that it accepts"
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
