"""The built-in data set: scikit-learn's 1,797 handwritten digits of 8x8 pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fathoms.data.sources.arrays import ArraySource

TEST_SHARE = 5
"""One digit in five is held out for testing."""


def _bunch() -> Any:
    from sklearn.datasets import load_digits

    return load_digits()


def digits(image_size: int = 8, in_channels: int = 1) -> tuple[Float[Tensor, "B C H W"], Int[Tensor, " B"]]:
    """All digits, scaled to [-1, 1], and their labels, in the data set's own order.

    Args:
        image_size: Side of the images; other than 8, they are resized (bilinear).
        in_channels: The grey channel is repeated this many times.
    """
    bunch = _bunch()
    images = torch.from_numpy(bunch.images).float()[:, None] / 8.0 - 1.0
    if image_size != 8:
        images = F.interpolate(images, size=(image_size, image_size), mode="bilinear", antialias=True)
    return images.expand(-1, in_channels, -1, -1), torch.from_numpy(bunch.target).long()


def digit_sources() -> tuple[ArraySource, ArraySource]:
    """The digits as a training and a test split, by a fixed shuffle."""
    bunch = _bunch()
    grey = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=3)
    order = np.random.default_rng(0).permutation(len(images))
    names = [str(name) for name in bunch.target_names]
    cut = len(order) // TEST_SHARE
    train, test = order[cut:], order[:cut]
    return (
        ArraySource("digits", "train", images[train], bunch.target[train], names),
        ArraySource("digits", "test", images[test], bunch.target[test], names),
    )
