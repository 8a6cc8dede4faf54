"""The data set that is always there: scikit-learn's 1,797 handwritten digits of 8x8 pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def digits(image_size: int = 8, in_channels: int = 1) -> tuple[Float[Tensor, "B C H W"], Int[Tensor, " B"]]:
    """All digits, scaled to [-1, 1], and their labels, in the data set's own order.

    Args:
        image_size: Side of the images; other than 8, they are resized (bilinear).
        in_channels: The grey channel is repeated this many times.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None] / 8.0 - 1.0
    if image_size != 8:
        images = F.interpolate(images, size=(image_size, image_size), mode="bilinear", antialias=True)
    return images.expand(-1, in_channels, -1, -1), torch.from_numpy(bunch.target).long()
