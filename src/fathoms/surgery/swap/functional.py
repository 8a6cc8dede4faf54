"""Norms that a model calls as functions, which no swap of modules can reach."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fathoms.models.hooks import hooked
from fathoms.surgery.inputs import run
from fathoms.surgery.swap.sites import kind_of

_NORMS = {F.layer_norm, F.rms_norm, F.batch_norm, F.group_norm, F.instance_norm}
_NORMS |= {torch.layer_norm, torch.rms_norm, torch.batch_norm, torch.group_norm, torch.instance_norm}


class _Watch(TorchFunctionMode):
    """Note each call of a norm function outside of a module that is a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[tuple[str, nn.Module]] = []
        self.seen: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NORMS and not any(kind_of(module) for _, module in self.stack):
            name = self.stack[-1][0] if self.stack else ""
            self.seen[name] = func.__name__
        return func(*args, **(kwargs or {}))


def functional_norms(model: nn.Module, images: Tensor) -> dict[str, str]:
    """Path of each module that calls a norm function itself, and the function, as one batch shows it."""
    watch = _Watch()
    handles = []
    for name, module in model.named_modules():
        enter = module.register_forward_pre_hook(
            lambda module, _inputs, name=name: watch.stack.append((name, module))
        )
        leave = module.register_forward_hook(lambda *_: watch.stack.pop() and None, always_call=True)
        handles += [enter, leave]
    with hooked(*handles), watch:
        run(model, images)
    return watch.seen
