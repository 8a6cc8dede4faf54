"""Shapes as SVG: one element that stands alone as a file or in a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

from fathoms.drawing.colours import PAPER
from fathoms.drawing.shapes import Area, Box, Dash, Dot, Line, Pixels, Point, Shape, Text


def to_svg(shapes: Sequence[Shape], size: Point, title: str = "") -> str:
    """The shapes on white; all text is escaped."""
    width, height = size
    place = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {place} role="img" font-family="Helvetica, Arial, sans-serif">'
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return "\n".join([head, *([_title(title)] if title else []), paper, *map(_element, shapes), "</svg>\n"])


def _element(shape: Shape) -> str:
    """One shape as an element."""
    match shape:
        case Line(points, colour, width, dash):
            drawn = f'fill="none" stroke="{colour}" stroke-width="{width:g}"{_dashed(dash)}'
            return f'<polyline points="{_joined(points)}" {drawn} stroke-linejoin="round"/>'
        case Area(points, colour, opacity):
            return f'<polygon points="{_joined(points)}" fill="{colour}"{_opacity(opacity)}/>'
        case Dot((x, y), colour, radius, opacity, tip):
            circle = f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}" fill="{colour}"{_opacity(opacity)}'
            return f"{circle}>{_title(tip)}</circle>" if tip else f"{circle}/>"
        case Box(at, size, colour):
            return f'<rect {_placed(at, size)} fill="{colour}"/>'
        case Text((x, y), words, size, anchor, colour, bold):
            place = f'x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}"'
            weight = ' font-weight="bold"' if bold else ""
            return f'<text {place} fill="{colour}"{weight}>{escape(words)}</text>'
        case Pixels():
            return _image(shape)


def _image(shape: Pixels) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(shape.values).save(buffer, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    sharp = 'preserveAspectRatio="none" image-rendering="pixelated"'
    return f'<image {_placed(shape.at, shape.size)} href="{source}" {sharp}/>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _joined(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points)


def _placed(at: Point, size: Point) -> str:
    return f'x="{at[0]:.2f}" y="{at[1]:.2f}" width="{size[0]:.2f}" height="{size[1]:.2f}"'


def _dashed(dash: Dash) -> str:
    return f' stroke-dasharray="{dash[0]:g} {dash[1]:g}"' if dash else ""


def _opacity(opacity: float) -> str:
    return f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
