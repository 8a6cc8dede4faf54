"""Run a bad update once more, slowly, and find where its numbers stop being finite.

The weights are still those before it, and its batches and its noise follow from counters, so it is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fathoms.data import Batch
from fathoms.train.distributed import World, gather_objects

Replay = Callable[[int], tuple[Tensor, Batch]]


def diagnose(
    model: nn.Module,
    replay: Replay,
    steps: range,
    where: Callable[[int], str],
    world: World,
) -> dict[str, Any]:
    """The step, rank, loss, first bad layer, first bad gradient and files of a bad update.

    Args:
        model: What has computed the update; its gradients and statistics are left as they are.
        replay: The loss and the batch of a step, computed once more.
        steps: The steps of the update.
        where: The name of a sample.
        world: Every rank looks at its own batches, and all are told what the first to find something found.
    """
    found: dict[str, Any] | None = None
    told: dict[str, Any] = {}
    with _set_aside(model):
        for step in steps:
            with _first_bad_output(model) as outputs:
                loss, batch = replay(step)
            bad_loss = not bool(loss.isfinite())
            with _first_bad_gradient(model) as gradients:
                loss.backward()
            gradient = gradients[0] if gradients else bad_gradient(model)
            files = [where(int(index)) for index in batch.ids]
            told = {"step": step, "rank": world.rank, "loss": float(loss.detach()), "files": files}
            told |= {"layer": outputs[0] if outputs else None, "gradient": gradient}
            if found is None and (outputs or bad_loss or gradient):
                found = told
    reports = [report for report in gather_objects(world, found) if report is not None]
    # A bad gradient is averaged over all ranks; a bad layer or loss is where it came from.
    reports.sort(key=lambda report: (report["layer"] is None, report["loss"] - report["loss"] == 0))
    return reports[0] if reports else {**told, "step": None}


@contextlib.contextmanager
def _set_aside(model: nn.Module) -> Iterator[None]:
    """Give gradients and buffers back as they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextlib.contextmanager
def _first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """A list that gets the name of the first module, in order of execution, whose output is not finite."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if not found and not all(
                bool(part.isfinite().all()) for part in parts if isinstance(part, Tensor)
            ):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _first_bad_gradient(model: nn.Module) -> Iterator[list[str]]:
    """A list that gets names of parameters, in the order of the backward pass, whose gradient is not finite."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                found.append(name)

        return hook

    own = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(look(name)) for name, parameter in own]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def bad_gradient(model: nn.Module) -> str | None:
    """A parameter whose gradient is not finite, or None: for shards, whose gradients come outside of the pass."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if own is not None and not bool(own.isfinite().all()):
            return name
    return None


def sentence(cause: dict[str, Any]) -> str:
    """Where, and with which batch, in words."""
    if cause["layer"] is not None:
        what = f"first in the output of {cause['layer']}"
    elif cause["gradient"] is not None:
        what = f"in the gradient of {cause['gradient']}, behind a forward pass that is finite"
    else:
        what = "in the loss alone" if cause["step"] is not None else "and not so when run once more"
    files = cause["files"]
    listed = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    step = "" if cause["step"] is None else f"step {cause['step']}, rank {cause['rank']}: "
    return f"{step}not a finite number (loss {cause['loss']:g}), {what}; the batch was {listed}"
