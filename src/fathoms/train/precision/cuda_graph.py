"""CUDA graphs: forward and backward pass of a batch as one launch instead of hundreds, with the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.train.precision.gradients import add_gradients

# Eager calls before the first capture: they compile, choose kernels and allocate workspaces.
WARMUP = 3

Compute = Callable[..., tuple[Tensor, ...]]


@dataclass
class _Capture:
    """A captured graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    gradients: list[Tensor | None]


class GraphedStep:
    """Run `compute`, which ends in a backward pass, as a replayed CUDA graph.

    The first calls with inputs of some shapes run eagerly; then the work is captured with static tensors, into which
    each call copies its inputs. Random numbers follow the generator, as outside of a graph.

    Args:
        compute: Takes tensors, sets or adds to the gradients of `parameters`, returns tensors without gradient.
        parameters: The parameters that `compute` gives gradients to.
        alone: Whether this is the only rank; NCCL's watchdog asks the device from a thread of its own, which must not
            spoil a capture.
    """

    def __init__(self, compute: Compute, parameters: Iterable[nn.Parameter], alone: bool = True) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("--launch graph: needs a CUDA device; use eager")
        self.compute, self.errors_of = compute, "global" if alone else "thread_local"
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.calls: Counter[Any] = Counter()
        self.captures: dict[Any, _Capture] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, which the next call overwrites."""
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
        # Gradients of earlier batches may be in the graph's own tensors, which the replay overwrites.
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
        with torch.cuda.graph(graph, capture_error_mode=self.errors_of):
            outputs = self.compute(*static)
        return _Capture(graph, static, outputs, [parameter.grad for parameter in self.parameters])


def launched(compute: Compute, launch: str | None, module: nn.Module, processes: int = 1) -> Compute:
    """`compute` itself, or as a CUDA graph if `launch` is "graph"."""
    if launch != "graph":
        return compute
    return GraphedStep(compute, module.parameters(), alone=processes == 1)
