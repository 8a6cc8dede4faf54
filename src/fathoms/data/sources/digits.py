"""The built-in data set: scikit-learn's 1,797 handwritten digits of 8x8 pixels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fathoms.data.sources.arrays import ArraySource

FILE = "datasets/data/digits.csv.gz"
"""Path of the digits inside scikit-learn."""
TEST_SHARE = 5
"""One digit in five is held out for testing."""


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Images from 0 to 16, and labels: scikit-learn's file, read without the seconds that its import takes."""
    package = importlib.util.find_spec("sklearn")
    places = [] if package is None else package.submodule_search_locations or []
    file = next((Path(place) / FILE for place in places if (Path(place) / FILE).is_file()), None)
    if file is None:
        from sklearn.datasets import load_digits

        bunch: Any = load_digits()
        return bunch.images, bunch.target
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def digits(image_size: int = 8, in_channels: int = 1) -> tuple[Float[Tensor, "B C H W"], Int[Tensor, " B"]]:
    """All digits, scaled to [-1, 1], and their labels, in the data set's own order.

    Args:
        image_size: Side of the images; other than 8, they are resized (bilinear).
        in_channels: The grey channel is repeated this many times.
    """
    pixels, labels = _read()
    images = torch.from_numpy(pixels).float()[:, None] / 8.0 - 1.0
    if image_size != 8:
        images = F.interpolate(images, size=(image_size, image_size), mode="bilinear", antialias=True)
    return images.expand(-1, in_channels, -1, -1), torch.from_numpy(labels).long()


def digit_sources() -> tuple[ArraySource, ArraySource]:
    """The digits as a training and a test split, by a fixed shuffle."""
    pixels, labels = _read()
    grey = np.round(pixels * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=3)
    order = np.random.default_rng(0).permutation(len(images))
    names = [str(digit) for digit in range(10)]
    cut = len(order) // TEST_SHARE
    train, test = order[cut:], order[:cut]
    return (
        ArraySource("digits", "train", images[train], labels[train], names),
        ArraySource("digits", "test", images[test], labels[test], names),
    )
