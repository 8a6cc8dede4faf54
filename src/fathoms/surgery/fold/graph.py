"""One run of a model as a graph of torch operations, with its parameters as named inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fathoms.errors import FathomsError
from fathoms.parts.attention import ClassAttention
from fathoms.surgery.accelerate.modules import OneQueryAttention
from fathoms.surgery.inputs import answers

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


def _scale_then_add(x: Tensor, scale: Tensor, branch: Tensor, *, value: float = 1) -> Tensor:
    """What a fused join does, in the steps that folding reads."""
    return x + scale * branch if value == 1 else x + value * (scale * branch)


def operation(node: fx.Node) -> str:
    """The name of a node's operation, such as "linear", or "output"."""
    target = node.target
    if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return getattr(target, "__name__", str(target)) if node.op == "call_function" else node.op


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of what a node gives."""
    return tuple(node.meta["val"].shape)


@dataclass(frozen=True)
class Traced:
    """A graph, and the model's parameters in it.

    Args:
        graph: What ran; folding rewrites it as it goes.
        sources: The name of the parameter behind each node that is one, or one in another shape.
    """

    graph: fx.Graph
    sources: dict[fx.Node, str]

    def source(self, node: Any) -> str | None:
        """The parameter behind an argument, or None if it is something else."""
        return self.sources.get(node) if isinstance(node, fx.Node) else None

    def users(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that read a node, without those that only assert something of it."""
        return [user for user in node.users if not operation(user).startswith("_assert")]

    def readers(self, parameter: str) -> Iterator[fx.Node]:
        """Every node that computes with a parameter."""
        for node, name in self.sources.items():
            if name == parameter:
                yield from (user for user in self.users(node) if user not in self.sources)


@torch.no_grad()
def trace(model: nn.Module, images: Tensor) -> Traced:
    """Run a model in inference on `images` and keep what it did.

    A model whose parameters are tied has one input for each parameter, not for each of its names.
    """
    # functional_call leaves its inputs behind in a module that has two names, so it gets a copy.
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ClassAttention | OneQueryAttention):
            # Where no key and no value is made, there is no linear for a scale to go into.
            module.impl = "reference"
    parameters = dict(model.named_parameters())

    def forward(weights: dict[str, Tensor], batch: Tensor) -> list[Tensor]:
        return answers(torch.func.functional_call(model, weights, (batch,)))

    # torch's multi-head attention has a fused form in inference that hides its linears.
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
            f"{type(model).__name__}: its run cannot be traced ({reason}); pass images= it takes"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = dict(zip(inputs, parameters, strict=False))
    for node in module.graph.nodes:
        if operation(node) in _RESHAPES and node.args and node.args[0] in sources:
            sources[node] = sources[node.args[0]]
    return Traced(module.graph, sources)
