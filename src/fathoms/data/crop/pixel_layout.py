"""Where pictures lie in a flat buffer of pixels, and which part of each is wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Places:
    """Where each picture and its box lie: arrays of length B on the host.

    `offset` counts pixels from the start of the buffer, `pitch` pixels from row to row; the box
    (top, left, height, width) may reach outside (h, w), and what it takes from there is black.
    """

    offset: np.ndarray
    pitch: np.ndarray
    size: np.ndarray
    box: np.ndarray
    flip: np.ndarray
    cubic: np.ndarray
