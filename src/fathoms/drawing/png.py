"""Shapes as PNG, drawn by Pillow."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathoms.drawing.colours import PAPER, channels
from fathoms.drawing.shapes import Area, Box, Dot, Line, Pixels, Point, Shape, Text

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

PNG_SCALE = 2
"""Pixels of a point."""
_SMOOTH = 2
"""Pillow draws lines without smoothing, so a PNG is drawn larger by this and reduced."""
_SCALE = PNG_SCALE * _SMOOTH
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def to_png(shapes: Sequence[Shape], size: Point) -> bytes:
    """The shapes on white, as a file."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (round(size[0] * _SCALE), round(size[1] * _SCALE)), PAPER)
    # On an RGB image, a pen of mode RGBA mixes colours by their opacity.
    pen = ImageDraw.Draw(image, "RGBA")
    for shape in shapes:
        _draw(image, pen, shape)
    small = image.resize((image.width // _SMOOTH, image.height // _SMOOTH), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _draw(image: Image, pen: ImageDraw, shape: Shape) -> None:
    """One shape, scaled."""
    match shape:
        case Line():
            _line(pen, shape)
        case Area(points, colour, opacity):
            pen.polygon([_scaled(point) for point in points], fill=_paint(colour, opacity))
        case Dot((x, y), colour, radius, opacity, _):
            corners = [_scaled((x + side * radius, y + side * radius)) for side in (-1, 1)]
            pen.ellipse(corners, fill=_paint(colour, opacity))
        case Box((x, y), (width, height), colour):
            right, bottom = _scaled((x + width, y + height))
            pen.rectangle((*_scaled((x, y)), right - 1, bottom - 1), fill=colour)
        case Text():
            _text(pen, shape)
        case Pixels():
            _paste(image, shape)


def _line(pen: ImageDraw, line: Line) -> None:
    points, width = [_scaled(point) for point in line.points], max(1, round(line.width * _SCALE))
    if line.dash is None:
        pen.line(points, fill=line.colour, width=width, joint="curve")
        return
    for begin, end in _dashes(points, line.dash[0] * _SCALE, line.dash[1] * _SCALE):
        pen.line([begin, end], fill=line.colour, width=width)


def _text(pen: ImageDraw, text: Text) -> None:
    from PIL import ImageFont

    pen.text(
        _scaled(text.at),
        text.words,
        fill=text.colour,
        font=ImageFont.load_default(text.size * _SCALE),
        anchor=_ANCHORS[text.anchor],
        stroke_width=round(0.03 * text.size * _SCALE) if text.bold else 0,
        stroke_fill=text.colour,
    )


def _paste(image: Image, shape: Pixels) -> None:
    from PIL import Image

    width, height = (max(1, round(side * _SCALE)) for side in shape.size)
    sharp = Image.fromarray(shape.values).resize((width, height), Image.Resampling.NEAREST)
    image.paste(sharp, (round(shape.at[0] * _SCALE), round(shape.at[1] * _SCALE)))


def _scaled(point: Point) -> Point:
    return point[0] * _SCALE, point[1] * _SCALE


def _paint(colour: str, opacity: float) -> tuple[int, int, int, int]:
    return (*channels(colour), round(255 * opacity))


def _dashes(points: Sequence[Point], on: float, off: float) -> list[tuple[Point, Point]]:
    """The drawn pieces of a dashed line."""
    found, travelled = [], 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        at = 0.0
        while at < length:
            phase = (travelled + at) % (on + off)
            step = min((on if phase < on else on + off) - phase, length - at) or length
            if phase < on:
                a, b = at / length, (at + step) / length
                found.append(
                    ((x0 + a * (x1 - x0), y0 + a * (y1 - y0)), (x0 + b * (x1 - x0), y0 + b * (y1 - y0)))
                )
            at += step
        travelled += length
    return found
