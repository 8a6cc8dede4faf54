"""CUDA graphs on a CPU: captured by running once, replayed by running again."""

from __future__ import annotations

from fathoms.training.compiling import _Capture


class PretendedGraph:
    """Replays by running again, into the tensors of the capture, as a graph does."""

    def __init__(self, step, inputs, outputs, gradients):
        self.step, self.inputs, self.outputs, self.gradients = step, inputs, outputs, gradients

    def replay(self):
        for parameter in self.step.parameters:
            parameter.grad = None
        results = self.step.compute(*self.inputs)
        made = [parameter.grad for parameter in self.step.parameters]
        for held, new in zip((*self.outputs, *self.gradients), (*results, *made), strict=True):
            held.copy_(new)


def pretend_capture(step, inputs):
    static = tuple(x.clone() for x in inputs)
    for parameter in step.parameters:
        parameter.grad = None
    outputs = step.compute(*static)
    gradients = [parameter.grad for parameter in step.parameters]
    return _Capture(PretendedGraph(step, static, outputs, gradients), static, outputs, gradients)
