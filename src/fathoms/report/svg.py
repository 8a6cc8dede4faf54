"""Standalone SVG: a canvas of shapes and text in the colours of the pages, for papers and slides."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fathoms.report.arms import COLOURS
from fathoms.report.quantities import clipped

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#c2609a", "#d18f00", "#56b4e9", "#3b3b3b")
"""The light colours of the pages, told apart by most who do not see all colours."""
INK, SOFT, RULE, BAND = "#1b1f24", "#5c6570", "#dcdedb", "#eeeeea"
DASHES = ("", "7 4", "2 4")
LETTER = 6.1
"""Width of a letter at 11 pixels, about."""


def paint(style: str) -> tuple[str, str]:
    """Colour and dashes of the classes of an arm.

    >>> paint("c1 m2")
    ('#d55e00', '2 4')
    """
    words = style.split()
    if len(words) != 2 or not (words[0][1:] + words[1][1:]).isdigit():
        return (INK if style == "sure" else SOFT), ""
    return PALETTE[int(words[0][1:]) % COLOURS], DASHES[int(words[1][1:]) % 3]


class Canvas:
    """Shapes on white, in pixels; every text that comes from files is escaped here."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = RULE, width: float = 1, dash: str = ""
    ) -> None:
        """A straight line."""
        place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {place} stroke="{colour}" stroke-width="{width:g}"{_dashed(dash)}/>')

    def path(self, points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> None:
        """An open line through points."""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.8"{_dashed(dash)}/>'
        )

    def area(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A faint closed area."""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{joined}" fill="{colour}" fill-opacity="0.16"/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {place} fill="{colour}"/>')

    def dot(self, x: float, y: float, colour: str, tip: str = "") -> None:
        """A point, with a tooltip where the figure is shown by a browser."""
        title = f"<title>{_text(tip)}</title>" if tip else ""
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}" fill-opacity="0.8">{title}</circle>'
        )

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", colour: str = SOFT, size: int = 11
    ) -> None:
        """A text of one line."""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} fill="{colour}" font-size="{size}">{_text(text)}</text>')

    def legend(self, entries: Sequence[tuple[str, str]], y: float, left: float) -> None:
        """Names with the styles of their lines, a row each."""
        for row, (name, style) in enumerate(entries):
            colour, dash = paint(style)
            self.line(left, y + 16 * row - 4, left + 22, y + 16 * row - 4, colour, 2.4, dash)
            self.text(left + 30, y + 16 * row, clipped(name, 100), colour=INK)

    def markup(self) -> str:
        """The file."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif">'
        white = f'<rect width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{_text(self.title)}</title>", white, *self.parts, "</svg>"]) + "\n"


def _dashed(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""


def _text(text: str) -> str:
    """Text that XML takes: no control characters, nothing that is markup."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text))


def text_width(texts: Sequence[str], most: float) -> float:
    """Room for the longest of some texts, at most `most`."""
    return min(most, LETTER * max((len(text) for text in texts), default=0) + 10)
