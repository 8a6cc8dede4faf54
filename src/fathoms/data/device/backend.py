"""Who does a device's share of the work, from crops to batches: torch, compiled torch, or Triton kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fathoms.data.augment import per_image as cpu
from fathoms.data.augment.batched import apply_layer, compiled_kernels
from fathoms.data.augment.finish import Finish, finish
from fathoms.data.augment.policy import Layer
from fathoms.data.crop.pixel_layout import Places
from fathoms.data.device.resize import resize_boxes
from fathoms.errors import ConfigError
from fathoms.ops.dispatch import why_not_triton
from fathoms.registry import check_name

KERNELS = ("auto", "torch", "inductor", "triton")


@dataclass(frozen=True)
class Forms:
    """The functions of one form; all give the same pixels, but for a level where a sum falls on the edge of two."""

    name: str
    resize: Callable[[Tensor, Places, int], Tensor]
    """As `fathoms.data.device.resize.resize_boxes`."""
    layer: Callable[[Tensor, Layer, Tensor], Tensor]
    """As `fathoms.data.augment.batched.apply_layer`."""
    finish: Callable[[Tensor, Tensor, Tensor, torch.dtype, Finish], Tensor]
    """As `fathoms.data.augment.finish.finish`."""

    def described(self, device: torch.device) -> str:
        """A word on it for the log; none where the workers do everything."""
        return f"; pictures on {device} by {self.name}" if device.type != "cpu" else ""


@functools.cache
def choose_forms(kernels: str, device: torch.device) -> Forms:
    """Resolve "auto": kernels on a CUDA device, else torch; on a CPU operations go picture by picture.

    An explicit choice is obeyed or refused, never swapped.
    """
    check_name(kernels, KERNELS, "form", "data.kernels")
    reason = why_not_triton(device)
    if kernels == "triton" and reason:
        raise ConfigError(f"data.kernels='triton' cannot run: {reason}; use 'auto'")
    if kernels == "triton" or (kernels == "auto" and device.type == "cuda" and not reason):
        # Triton is imported here, so that this module loads where it is not installed.
        from fathoms.data.device.triton.finish import finish as fused_finish
        from fathoms.data.device.triton.layer import apply_layer as fused_layer
        from fathoms.data.device.triton.resize import resize_boxes as fused_resize

        return Forms("triton", fused_resize, fused_layer, fused_finish)
    if kernels == "inductor":
        layer = functools.partial(apply_layer, kernels=compiled_kernels())
        return Forms("inductor", functools.partial(resize_boxes, compile="inductor"), layer, finish)
    if kernels == "auto" and device.type == "cpu":
        return Forms("picture by picture", resize_boxes, cpu.apply_layer, finish)
    return Forms("torch", resize_boxes, apply_layer, finish)
