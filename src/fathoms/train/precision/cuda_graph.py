"""A training step as one CUDA graph: hundreds of small launches become one, and the numbers stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.train.precision.gradients import add_gradients

# Steps that run as they are before the first capture: they compile, choose kernels and allocate workspaces.
WARMUP = 3

Compute = Callable[..., tuple[Tensor, ...]]


@dataclass
class _Capture:
    """One captured graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    gradients: list[Tensor | None]


class GraphedStep:
    """Run `compute`, which ends in a backward pass, as a replayed CUDA graph.

    The first calls with inputs of some shapes run as they are; then the work is captured with tensors that stay in
    place, and each call copies its inputs there. Random numbers follow the generator, as outside of a graph.

    Args:
        compute: Takes tensors, gives `parameters` gradients or adds to them, returns tensors without gradient.
        parameters: What `compute` gives gradients to.
    """

    def __init__(self, compute: Compute, parameters: Iterable[nn.Parameter]) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("launch='graph' needs a CUDA device; use 'eager'")
        self.compute = compute
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.calls: Counter[Any] = Counter()
        self.captures: dict[Any, _Capture] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs; they are overwritten by the next call."""
        shapes = tuple((x.shape, x.dtype) for x in inputs)
        self.calls[shapes] += 1
        if self.calls[shapes] <= WARMUP:
            return self.compute(*inputs)
        waiting = [parameter.grad for parameter in self.parameters]
        if shapes not in self.captures:
            self.captures[shapes] = self._capture(inputs)
        captured = self.captures[shapes]
        for static, given in zip(captured.inputs, inputs, strict=True):
            static.copy_(given)
        # What waits may be in the graph's own tensors, which are about to be overwritten.
        waiting = [None if gradient is None else gradient.clone() for gradient in waiting]
        captured.graph.replay()
        for parameter, gradient in zip(self.parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        pairs = zip(self.parameters, waiting, strict=True)
        add_gradients((parameter, gradient) for parameter, gradient in pairs if gradient is not None)
        return captured.outputs

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Capture:
        static = tuple(x.clone() for x in inputs)
        for parameter in self.parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.compute(*static)
        return _Capture(graph, static, outputs, [parameter.grad for parameter in self.parameters])


def launched(compute: Compute, launch: str | None, module: nn.Module, processes: int = 1) -> Compute:
    """`compute` launched kernel by kernel, or with "graph" as one CUDA graph."""
    if launch != "graph":
        return compute
    if processes > 1:
        raise ConfigError("--launch graph is for one process; leave it out")
    return GraphedStep(compute, module.parameters())
