"""Find the first layer whose output or gradient is not finite, by running a bad update again.

The weights are still those before it, and its batches and random numbers follow from counters, so it is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.models.hooks import hooked
from fathoms.train.distributed import World, gather_objects, own_part


def locate_nonfinite(
    model: nn.Module,
    replay: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    where: Callable[[int], str],
    world: World,
) -> dict[str, Any]:
    """The batch, rank, loss, files and first bad layer, gradient or norm of a bad update, for guard.jsonl.

    Args:
        model: The module that computed the update; its gradients and buffers are left as they were.
        replay: Computes the loss of a batch once more.
        batches: The update's batches.
        where: The name of a sample.
        world: Every rank replays its own batches; all get the report of the first that found something.
    """
    found: dict[str, Any] | None = None
    report: dict[str, Any] = {}
    with _restoring(model):
        for batch in batches:
            with _first_bad_output(model) as outputs:
                loss = replay(batch)
            bad_loss = not bool(loss.isfinite())
            with _first_bad_gradient(model) as gradients:
                loss.backward()
            gradient = gradients[0] if gradients else bad_gradient(model)
            overflow = None if gradient else overflowing_gradient(model)
            files = [where(int(index)) for index in batch.ids]
            # "step" is the batch's number in guard.jsonl, whose readers know it by that name.
            report = {"step": batch.number, "rank": world.rank, "loss": float(loss.detach()), "files": files}
            report |= {"layer": outputs[0] if outputs else None, "gradient": gradient, "overflow": overflow}
            if found is None and (outputs or bad_loss or gradient or overflow):
                found = report
    reports = [other for other in gather_objects(world, found) if other is not None]
    # DDP averages a bad gradient over all ranks; a bad layer or loss is where it came from.
    reports.sort(key=lambda other: (other["layer"] is None, other["loss"] - other["loss"] == 0))
    return reports[0] if reports else {**report, "step": None}


@contextlib.contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Clear the gradients, and put them and the buffers back at the end."""
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
    """A list that receives the name of the first module, in order of execution, whose output is not finite."""
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
    with hooked(*hooks):
        yield found


@contextlib.contextmanager
def _first_bad_gradient(model: nn.Module) -> Iterator[list[str]]:
    """A list that receives, in the order of the backward pass, the parameters whose gradient is not finite."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                found.append(name)

        return hook

    own = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(look(name)) for name, parameter in own]
    with hooked(*hooks):
        yield found


def bad_gradient(model: nn.Module) -> str | None:
    """A parameter whose gradient is not finite, or None; FSDP sets gradients outside of the hooks above."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and not bool(own_part(gradient).isfinite().all()):
            return name
    return None


def overflowing_gradient(model: nn.Module) -> str | None:
    """The parameter with the largest gradient, where the norm of the whole is beyond float32; else None.

    Every value may be finite: the norm adds up their squares.
    """
    own = {name: own_part(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    if not own or bool(nn.utils.get_total_norm(list(own.values())).isfinite()):
        return None
    return max(own, key=lambda name: float(own[name].abs().max()) if own[name].numel() else 0.0)


def describe(cause: dict[str, Any]) -> str:
    """The cause as part of a sentence: batch, loss, layer and files."""
    if cause["layer"] is not None:
        what = f"first in the output of {cause['layer']}"
    elif cause["gradient"] is not None:
        what = f"in the gradient of {cause['gradient']}, after a finite forward pass"
    elif cause.get("overflow") is not None:
        what = f"in the norm of the gradient, which is largest in {cause['overflow']}, after a finite forward pass"
    else:
        what = "in the loss alone" if cause["step"] is not None else "but finite when run again"
    files = cause["files"]
    listed = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    batch = "" if cause["step"] is None else f"batch {cause['step']}, rank {cause['rank']}: "
    return f"{batch}not a finite number (loss {cause['loss']:g}), {what}; the batch was {listed}"
