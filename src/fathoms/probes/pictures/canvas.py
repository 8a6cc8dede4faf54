"""A drawing of lines, boxes, texts and pixel images that is written as SVG or, with Pillow, as PNG.

The same shapes go to both formats, so that no plotting library is needed and both look the same.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from fathoms.atomic import write_atomic
from fathoms.errors import ConfigError

# Okabe and Ito's colours, told apart by readers with any kind of colour vision, in an order that starts dark.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, SOFT, RULE, PAPER = "#1b1f24", "#5c6570", "#e0e2df", "#ffffff"
# Dark blue to yellow in even lightness.
RAMP = ("#2b2f6b", "#35518f", "#3a74a3", "#4396a6", "#5bb79c", "#8cd38a", "#c6e77c", "#f7f59a")
PNG_SCALE = 2
_SMOOTH = 2
"""Pillow draws lines without smoothing, so a PNG is drawn larger by this and reduced."""

Point = tuple[float, float]


@dataclass
class Picture:
    """A drawing of `width` x `height` points; `data` are the numbers behind it."""

    width: float
    height: float
    data: Any = None
    shapes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def line(
        self, points: Sequence[Point], colour: str = INK, width: float = 1.0, dashed: bool = False
    ) -> None:
        """A line through points."""
        self.shapes.append(
            ("line", {"points": list(points), "colour": colour, "width": width, "dashed": dashed})
        )

    def dot(self, at: Point, colour: str = INK, radius: float = 2.2) -> None:
        """A filled circle."""
        self.shapes.append(("dot", {"at": at, "colour": colour, "radius": radius}))

    def box(self, at: Point, size: Point, colour: str) -> None:
        """A filled rectangle."""
        self.shapes.append(("box", {"at": at, "size": size, "colour": colour}))

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
        shape = {"at": at, "words": words, "size": size, "anchor": anchor, "colour": colour, "bold": bold}
        self.shapes.append(("text", shape))

    def pixels(self, at: Point, size: Point, values: np.ndarray) -> None:
        """An image of (rows, columns, 3) bytes, every pixel a sharp square."""
        self.shapes.append(
            ("pixels", {"at": at, "size": size, "values": np.ascontiguousarray(values, np.uint8)})
        )

    def svg(self) -> str:
        """The drawing as one SVG element."""
        body = "\n".join(_SVG[kind](shape) for kind, shape in self.shapes)
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        font = 'font-family="Helvetica, Arial, sans-serif"'
        paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{paper}\n{body}\n</svg>\n'

    def png(self) -> bytes:
        """The drawing as a PNG file."""
        from PIL import Image, ImageDraw

        scale = PNG_SCALE * _SMOOTH
        image = Image.new("RGB", (round(self.width * scale), round(self.height * scale)), PAPER)
        draw = ImageDraw.Draw(image)
        for kind, shape in self.shapes:
            _PNG[kind](image, draw, shape, scale)
        small = image.resize((image.width // _SMOOTH, image.height // _SMOOTH), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        small.save(buffer, "PNG", optimize=True)
        return buffer.getvalue()

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


def ramp_pixels(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """A map of numbers as (rows, columns, 3) bytes; what is not finite is grey."""
    stops = np.array([[int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in RAMP], float)
    share = np.clip((values - low) / ((high - low) or 1.0), 0, 1) * (len(RAMP) - 1)
    known = np.isfinite(share)
    share = np.where(known, share, 0.0)
    index = np.minimum(share.astype(int), len(RAMP) - 2)
    mixed = stops[index] + (stops[index + 1] - stops[index]) * (share - index)[..., None]
    return np.where(known[..., None], mixed.round(), 190).astype(np.uint8)


def _svg_line(shape: dict[str, Any]) -> str:
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape["points"])
    dash = ' stroke-dasharray="4 3"' if shape["dashed"] else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{shape["colour"]}" stroke-width="{shape["width"]:g}"'
        f'{dash} stroke-linejoin="round" stroke-linecap="round"/>'
    )


def _svg_text(shape: dict[str, Any]) -> str:
    x, y = shape["at"]
    weight = ' font-weight="bold"' if shape["bold"] else ""
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{shape["size"]:g}" text-anchor="{shape["anchor"]}" '
        f'fill="{shape["colour"]}"{weight}>{escape(shape["words"])}</text>'
    )


def _svg_box(shape: dict[str, Any]) -> str:
    (x, y), (width, height) = shape["at"], shape["size"]
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{shape["colour"]}"/>'
    )


def _svg_dot(shape: dict[str, Any]) -> str:
    x, y = shape["at"]
    return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{shape["radius"]:g}" fill="{shape["colour"]}"/>'


def _svg_pixels(shape: dict[str, Any]) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(shape["values"]).save(buffer, "PNG", optimize=True)
    (x, y), (width, height) = shape["at"], shape["size"]
    source = quoteattr("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    return (
        f'<image x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" href={source} '
        'preserveAspectRatio="none" image-rendering="pixelated"/>'
    )


def _png_line(_image: Any, draw: Any, shape: dict[str, Any], scale: float) -> None:
    points = [(x * scale, y * scale) for x, y in shape["points"]]
    width = max(1, round(shape["width"] * scale))
    if not shape["dashed"]:
        draw.line(points, fill=shape["colour"], width=width, joint="curve")
        return
    for begin, end in _dashes(points, 4 * scale, 3 * scale):
        draw.line([begin, end], fill=shape["colour"], width=width)


def _dashes(points: Sequence[Point], on: float, off: float) -> list[tuple[Point, Point]]:
    """The drawn pieces of a dashed line."""
    found, travelled = [], 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = float(np.hypot(x1 - x0, y1 - y0))
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


def _png_text(_image: Any, draw: Any, shape: dict[str, Any], scale: float) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(shape["size"] * scale)
    x, y = shape["at"]
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape["anchor"]]
    stroke = round(0.03 * shape["size"] * scale) if shape["bold"] else 0
    place = (x * scale, y * scale)
    draw.text(
        place, shape["words"], fill=shape["colour"], font=font, anchor=anchor, stroke_width=stroke,
        stroke_fill=shape["colour"],
    )  # fmt: skip


def _png_box(_image: Any, draw: Any, shape: dict[str, Any], scale: float) -> None:
    (x, y), (width, height) = shape["at"], shape["size"]
    draw.rectangle(
        (x * scale, y * scale, (x + width) * scale - 1, (y + height) * scale - 1), fill=shape["colour"]
    )


def _png_dot(_image: Any, draw: Any, shape: dict[str, Any], scale: float) -> None:
    (x, y), radius = shape["at"], shape["radius"]
    draw.ellipse([(v + s * radius) * scale for s in (-1, 1) for v in (x, y)], fill=shape["colour"])


def _png_pixels(image: Any, _draw: Any, shape: dict[str, Any], scale: float) -> None:
    from PIL import Image

    size = [max(1, round(side * scale)) for side in shape["size"]]
    sharp = Image.fromarray(shape["values"]).resize((size[0], size[1]), Image.Resampling.NEAREST)
    image.paste(sharp, (round(shape["at"][0] * scale), round(shape["at"][1] * scale)))


_SVG = {"line": _svg_line, "text": _svg_text, "box": _svg_box, "dot": _svg_dot, "pixels": _svg_pixels}
_PNG = {"line": _png_line, "text": _png_text, "box": _png_box, "dot": _png_dot, "pixels": _png_pixels}
