"""Choose the backend of device-side resizing, augmentation and normalisation: torch or Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fathoms.data.augment.backend import BATCHED, PER_IMAGE
from fathoms.data.augment.finish import Finish
from fathoms.data.augment.pipeline import Augment
from fathoms.data.augment.policy import Layer
from fathoms.data.crop.pixel_buffer import PixelLayout
from fathoms.data.device.resize import resize_boxes
from fathoms.errors import ConfigError
from fathoms.names.registry import check_name
from fathoms.ops.dispatch import why_not_triton

IMPLS = ("auto", "torch", "triton")


@dataclass(frozen=True)
class Backend:
    """The functions of one backend; all give the same pixels, but for one level where a sum falls between two."""

    name: str
    resize: Callable[[Tensor, PixelLayout, int], Tensor]
    """As `fathoms.data.device.resize.resize_boxes`."""
    layer: Callable[[Tensor, Layer, Tensor], Tensor]
    """As `fathoms.data.augment.batched.apply_layer`."""
    finish: Callable[[Tensor, Tensor, Tensor, torch.dtype, Finish], Tensor]
    """As `fathoms.data.augment.finish.finish`."""

    def described(self, device: torch.device) -> str:
        """A few words for the log; empty where the workers do everything."""
        return f"; images on {device} by {self.name}" if device.type != "cpu" else ""


@functools.cache
def choose_backend(impl: str, device: torch.device) -> Backend:
    """Resolve "auto": Triton on a CUDA device, else torch; on a CPU operations run image by image.

    An explicit choice is obeyed or refused, never swapped.
    """
    check_name(impl, IMPLS, "backend", "impl")
    reason = why_not_triton(device)
    if impl == "triton" and reason:
        raise ConfigError(f'impl="triton" cannot run: {reason}; use impl="auto"')
    if impl == "triton" or (impl == "auto" and device.type == "cuda" and not reason):
        # Triton is imported here, so that this module loads where it is not installed.
        from fathoms.data.device.triton.finish import finish as fused_finish
        from fathoms.data.device.triton.layer import apply_layer as fused_layer
        from fathoms.data.device.triton.resize import resize_boxes as fused_resize

        return Backend("triton", fused_resize, fused_layer, fused_finish)
    plain = PER_IMAGE if impl == "auto" and device.type == "cpu" else BATCHED
    return Backend(plain.name, resize_boxes, plain.layer, plain.finish)


def loader_backend(augment: Augment | None, device: torch.device) -> Backend:
    """The backend of a loader: that of its augmentation, so that one choice covers resizing too."""
    if augment is None:
        return choose_backend("auto", device)
    return augment.backend if isinstance(augment.backend, Backend) else choose_backend("torch", device)
