"""Shapes of a drawing, in points from the top left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Point = tuple[float, float]
Dash = tuple[float, float] | None
"""Lengths of a dash and of the gap after it; None for a whole line."""


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: Sequence[Point]
    colour: str
    width: float
    dash: Dash


@dataclass(frozen=True)
class Area:
    """A closed area of which `opacity` covers what is below."""

    points: Sequence[Point]
    colour: str
    opacity: float


@dataclass(frozen=True)
class Dot:
    """A filled circle; `tip` is shown where a pointer rests on it."""

    at: Point
    colour: str
    radius: float
    opacity: float
    tip: str


@dataclass(frozen=True)
class Box:
    """A filled rectangle."""

    at: Point
    size: Point
    colour: str


@dataclass(frozen=True)
class Text:
    """Words on one line; `anchor`: whether their baseline starts, has its middle or ends at the point."""

    at: Point
    words: str
    size: float
    anchor: str
    colour: str
    bold: bool


@dataclass(frozen=True)
class Pixels:
    """An image of (rows, columns, 3) bytes, every pixel a sharp square."""

    at: Point
    size: Point
    values: np.ndarray


Shape = Line | Area | Dot | Box | Text | Pixels


def without_controls(text: str) -> str:
    """Text without control characters, which neither XML nor a font takes: each is a space."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
