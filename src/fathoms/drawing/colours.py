"""Colours of every drawing and page: a palette for lines, inks for text, a ramp for maps of numbers."""

from __future__ import annotations

import numpy as np

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#c2609a", "#d18f00", "#56b4e9", "#3b3b3b")
"""Okabe and Ito's colours, told apart with any kind of colour vision; the light ones darkened to be read on white.

The pages have the same ones, `--c0` to `--c6` of comparison.css.
"""
INK, SOFT, RULE, BAND, PAPER = "#1b1f24", "#5c6570", "#dcdedb", "#eeeeea", "#ffffff"
"""Text, text beside it, lines of a grid, a band behind a plot, and the ground."""
RAMP = ("#2b2f6b", "#35518f", "#3a74a3", "#4396a6", "#5bb79c", "#8cd38a", "#c6e77c", "#f7f59a")
"""Dark blue to yellow in even lightness, readable on white and on black."""
UNKNOWN = 190
"""Grey of what is not a finite number."""


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`.

    >>> channels("#0072b2")
    (0, 114, 178)
    """
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return red, green, blue


_STOPS = np.array([channels(colour) for colour in RAMP], float)


def ramp_pixels(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """A map of numbers as (rows, columns, 3) bytes; what is not finite is grey."""
    share = np.clip((values - low) / ((high - low) or 1.0), 0, 1) * (len(RAMP) - 1)
    known = np.isfinite(share)
    share = np.where(known, share, 0.0)
    index = np.minimum(share.astype(int), len(RAMP) - 2)
    mixed = _STOPS[index] + (_STOPS[index + 1] - _STOPS[index]) * (share - index)[..., None]
    return np.where(known[..., None], mixed.round(), UNKNOWN).astype(np.uint8)


def ramp_colour(share: float) -> str:
    """The colour at a share of the ramp, from 0 to 1.

    >>> ramp_colour(0.0)
    '#2b2f6b'
    """
    return "#" + "".join(f"{value:02x}" for value in ramp_pixels(np.array(share), 0.0, 1.0))
