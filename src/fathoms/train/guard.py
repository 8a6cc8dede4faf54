"""When numbers stop being numbers: find the first layer and the batch, before the weights are touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError


class DivergedError(FathomsError):
    """The loss or a gradient is not finite; the message names the layer and the batch."""


def first_bad_layer(model: nn.Module, images: Tensor) -> str | None:
    """The first module, in order of execution, whose output is not finite; None if all are."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not output.isfinite().all():
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def first_bad_gradient(model: nn.Module) -> str | None:
    """The first parameter whose gradient is not finite, or None."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return name
    return None


def explain(model: nn.Module, images: Tensor, loss: float, where: str, files: list[str]) -> DivergedError:
    """The error for a step whose loss or gradient is not finite."""
    layer = first_bad_layer(model, images)
    if layer is not None:
        what = f"first in the output of {layer}"
    else:
        gradient = first_bad_gradient(model)
        what = f"in the gradient of {gradient}" if gradient else "in the loss alone"
    listed = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    return DivergedError(
        f"{where}: not a finite number (loss {loss:g}), {what}; the batch was {listed}; "
        "the weights are those before this step; lower --lr, or add --warmup-epochs or --clip-grad"
    )
