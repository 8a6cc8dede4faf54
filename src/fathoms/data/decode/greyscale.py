"""Greyscale: the mean of R, G and B in all three channels, which is what a model of one channel sees."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8


def greyscale(pixels: UInt8[np.ndarray, "*shape 3"]) -> UInt8[np.ndarray, "*shape 3"]:
    """The mean of R, G and B, rounded; pixels that are grey already stay as they are.

    >>> greyscale(np.array([[10, 20, 31], [7, 7, 7]], np.uint8)).tolist()
    [[20, 20, 20], [7, 7, 7]]
    """
    total = pixels.sum(axis=-1, dtype=np.uint16, keepdims=True)
    return np.repeat(((total + 1) // 3).astype(np.uint8), 3, axis=-1)
