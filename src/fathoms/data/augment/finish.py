"""The last stages of a batch, from bytes to the model's input: normalise, erase, mix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fathoms.data.augment.erase import erase
from fathoms.data.augment.mix import Mixture, mix_images


@dataclass(frozen=True)
class Erasing:
    """Rectangles (B, count, 4) of top, left, height and width, the fill mode, and each sample's key."""

    rectangles: np.ndarray
    mode: str
    keys: np.ndarray


@dataclass(frozen=True)
class Finish:
    """The random choices of the last stages of a batch; None skips a stage."""

    erasing: Erasing | None
    mixture: Mixture | None


def normalise(
    images: UInt8[Tensor, "B 3 H W"],
    scale: Float[Tensor, "3 1 1"],
    shift: Float[Tensor, "3 1 1"],
    dtype: torch.dtype,
) -> Float[Tensor, "B 3 H W"]:
    """Pixels v as v * scale + shift, which is (v / 255 - mean) / std, computed in float32."""
    return torch.addcmul(shift, images, scale).to(dtype)


def finish(
    images: UInt8[Tensor, "B 3 H W"],
    scale: Float[Tensor, "3 1 1"],
    shift: Float[Tensor, "3 1 1"],
    dtype: torch.dtype,
    drawn: Finish,
) -> Float[Tensor, "B 3 H W"]:
    """Normalise, erase and mix."""
    out = normalise(images, scale, shift, dtype)
    if drawn.erasing is not None:
        out = erase(out, drawn.erasing.rectangles, drawn.erasing.mode, drawn.erasing.keys)
    return out if drawn.mixture is None else mix_images(out, drawn.mixture)
