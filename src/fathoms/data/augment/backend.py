"""Backends of augmentation in torch: what `Augment` calls to change pixels.

A backend with Triton kernels is chosen by `fathoms.data.device.backend` and handed to `Augment`, so that nothing
here depends on the device's kernels, which depend on this folder's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fathoms.data.augment import batched, per_image
from fathoms.data.augment.finish import Finish, finish
from fathoms.data.augment.policy import Layer


@runtime_checkable
class AugmentBackend(Protocol):
    """The operations and last stages of augmentation, as `Augment` calls them."""

    @property
    def name(self) -> str:
        """Its name in the log."""
        ...

    @property
    def layer(self) -> Callable[[Tensor, Layer, Tensor], Tensor]:
        """As `fathoms.data.augment.batched.apply_layer`."""
        ...

    @property
    def finish(self) -> Callable[[Tensor, Tensor, Tensor, torch.dtype, Finish], Tensor]:
        """As `fathoms.data.augment.finish.finish`."""
        ...


@dataclass(frozen=True)
class TorchBackend:
    """Operations and last stages of a batch, in torch."""

    name: str
    layer: Callable[[Tensor, Layer, Tensor], Tensor]
    finish: Callable[[Tensor, Tensor, Tensor, torch.dtype, Finish], Tensor]


BATCHED = TorchBackend("torch", batched.apply_layer, finish)
"""Samples with the same operation go through it together: for any device, and the reference."""
PER_IMAGE = TorchBackend("image by image", per_image.apply_layer, finish)
"""One image at a time: several times as fast on a CPU, and only there."""


def torch_backend(device: torch.device) -> TorchBackend:
    """The faster of the two for a device."""
    return PER_IMAGE if device.type == "cpu" else BATCHED
