"""A drawing of lines, areas, texts and pixel images that is written as SVG or, with Pillow, as PNG.

The same shapes go to both formats, so that no plotting library is needed and both look the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fathoms.drawing.colours import INK
from fathoms.drawing.png import to_png
from fathoms.drawing.shapes import Area, Box, Dash, Dot, Line, Pixels, Point, Shape, Text, without_controls
from fathoms.drawing.svg import to_svg
from fathoms.errors import ConfigError
from fathoms.files.atomic import write_atomic


@dataclass
class Picture:
    """A drawing of `width` x `height` points; every text that comes from files is made harmless here.

    Args:
        width: Its width.
        height: Its height.
        title: What it shows, for readers who do not see it.
        data: The numbers behind it, as JSON has them.
    """

    width: float
    height: float
    title: str = ""
    data: Any = None
    shapes: list[Shape] = field(default_factory=list)

    def line(self, points: Sequence[Point], colour: str = INK, width: float = 1.0, dash: Dash = None) -> None:
        """A line through points."""
        self.shapes.append(Line(list(points), colour, width, dash))

    def area(self, points: Sequence[Point], colour: str, opacity: float = 0.16) -> None:
        """A faint closed area."""
        self.shapes.append(Area(list(points), colour, opacity))

    def dot(
        self, at: Point, colour: str = INK, radius: float = 2.2, *, opacity: float = 1.0, tip: str = ""
    ) -> None:
        """A filled circle, with a tooltip where a browser shows the drawing."""
        self.shapes.append(Dot(at, colour, radius, opacity, without_controls(tip)))

    def box(self, at: Point, size: Point, colour: str) -> None:
        """A filled rectangle."""
        self.shapes.append(Box(at, size, colour))

    def text(
        self,
        at: Point,
        words: str,
        *,
        size: float = 11,
        anchor: str = "start",
        colour: str = INK,
        bold: bool = False,
    ) -> None:
        """Words whose baseline begins, is centred or ends at a point."""
        self.shapes.append(Text(at, without_controls(words), size, anchor, colour, bold))

    def pixels(self, at: Point, size: Point, values: np.ndarray) -> None:
        """An image of (rows, columns, 3) bytes, every pixel a sharp square."""
        self.shapes.append(Pixels(at, size, np.ascontiguousarray(values, np.uint8)))

    @property
    def has_pixels(self) -> bool:
        """Whether a pixel image is in it."""
        return any(isinstance(shape, Pixels) for shape in self.shapes)

    def svg(self) -> str:
        """The drawing as one SVG element."""
        return to_svg(self.shapes, (self.width, self.height), without_controls(self.title))

    def png(self) -> bytes:
        """The drawing as a PNG file."""
        return to_png(self.shapes, (self.width, self.height))

    def save(self, path: str | Path) -> Path:
        """Write the drawing; the name's ending, .svg, .png or .json for the data, is the format."""
        path = Path(path)
        writers = {
            ".svg": lambda: self.svg().encode(),
            ".png": self.png,
            ".json": lambda: json.dumps(self.data).encode() + b"\n",
        }
        if path.suffix not in writers:
            raise ConfigError(f"{path}: pictures are written as .svg, .png or .json; end the name so")
        write_atomic(path, writers[path.suffix]())
        return path
