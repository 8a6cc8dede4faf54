"""matplotlib as fathoms uses it: one style, colours for any colour vision, and SVG that a page can hold.

Functions that draw are marked `styled` and return a `matplotlib.figure.Figure`; matplotlib is imported when one is
called. No global state is touched: neither pyplot nor the caller's rcParams.
"""

from __future__ import annotations

import functools
import html
import io
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from fathoms.errors import ConfigError
from fathoms.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

P = ParamSpec("P")

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#c2609a", "#d18f00", "#56b4e9", "#3b3b3b")
"""Okabe and Ito's colours, told apart with any kind of colour vision; the light ones darkened to be read on white."""
INK, SOFT, RULE, BAND, PAPER = "#1b1f24", "#5c6570", "#e6e7e3", "#eeeeea", "#ffffff"
"""Text, text beside it, lines of a grid, a band behind a plot, and the ground."""
RAMP = ("#2b2f6b", "#35518f", "#3a74a3", "#4396a6", "#5bb79c", "#8cd38a", "#c6e77c", "#f7f59a")
"""Dark blue to yellow in even lightness, readable on white and on black."""
UNKNOWN = "#bebebe"
"""Of what is not a finite number."""
DASHES = ((0, ()), (0, (5, 3)), (0, (1.5, 2.5)))
"""Lines beyond the palette take its colours again with the next dashes."""
MARKERS = ("o", "s", "^")
VARIABLES = {INK: "--ink", SOFT: "--soft", RULE: "--rule", BAND: "--band", PAPER: "--card"}
VARIABLES |= {colour: f"--c{place}" for place, colour in enumerate(PALETTE)}
"""Custom properties of the pages' style sheet that stand for a colour in either theme."""

_STYLE: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.07,
    "figure.facecolor": PAPER,
    "figure.titlesize": 13,
    "figure.titleweight": "bold",
    "font.size": 11,
    "text.color": INK,
    # Names of arms and classes may hold a dollar sign.
    "text.parse_math": False,
    "axes.facecolor": "none",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": RULE,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "legend.labelcolor": SOFT,
    "image.interpolation": "none",
    "image.aspect": "auto",
    "svg.fonttype": "none",
    "svg.hashsalt": "fathoms",
}


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A name may have letters that matplotlib's font lacks; the SVG leaves them to the reader's fonts.
        warnings.filterwarnings("ignore", r"(?s).*[Gg]lyph .* missing", UserWarning)
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Make a function draw in the style of fathoms."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _style():
            return draw(*args, **kwargs)

    return drawn


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure of a size in points, which are the pixels of its SVG; a notebook shows it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=144)
    # Without pyplot a notebook would print the size alone.
    vars(figure)["_repr_svg_"] = functools.partial(to_svg, figure)
    if title:
        figure.suptitle(printed(title), x=0.01, ha="left")
    return figure


def printed(text: str) -> str:
    """Text without control characters, which neither XML nor a font takes: each is a space."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def colour_map() -> Colormap:
    """The map from numbers to colours of `RAMP`."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("fathoms", RAMP).with_extremes(bad=UNKNOWN)


def short_number(value: float, _place: object = None) -> str:
    """A number in few characters, as a tick of a logarithmic axis has it.

    >>> short_number(0.00002), short_number(0.00016), short_number(-12.5)
    ('2e-5', '1.6e-4', '−12.5')
    """
    text = f"{value:.4g}"
    if value and not 1e-3 <= abs(value) < 1e5:
        text = f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return text.replace("-", "−", 1) if value < 0 else text


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Ticks of a logarithmic axis: powers of ten, over two decades or fewer 1, 2 and 5 times them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    subs = (1,) if high > 100 * low else (1, 2, 5)
    axis.set_major_locator(MaxNLocator(4) if high < 3 * low else LogLocator(subs=subs, numticks=6))
    axis.set_major_formatter(FuncFormatter(short_number))
    axis.set_minor_locator(NullLocator())


_DRAWN: weakref.WeakKeyDictionary[Figure, str] = weakref.WeakKeyDictionary()


def _drawn(figure: Figure) -> str:
    """What matplotlib writes of a figure, once: it stands in a page and in a file of its own."""
    if figure not in _DRAWN or figure.stale:
        buffer = io.StringIO()
        with _style():
            figure.savefig(
                buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None}
            )
        _DRAWN[figure] = buffer.getvalue()
    return _DRAWN[figure]


def to_svg(figure: Figure, *, page: str = "") -> str:
    """A figure as one SVG element whose text is text.

    Args:
        figure: The figure.
        page: A word that no other figure of an HTML page has. Such an SVG takes the page's font and its colours, which
            follow the theme, and has no `style` attribute, as the page's policy asks.
    """
    text = _drawn(figure)
    title = html.escape(figure.get_suptitle())
    text = re.sub(
        r"(?s)<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", text[text.index("<svg") :]
    )
    text = re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], page), text)
    text = re.sub(r">\s+<", "><", text).replace("<g></g>", "")
    family = "" if page else ' font-family="Helvetica, Arial, sans-serif"'
    text = text.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1) if page else text
    name = f"<title>{title}</title>" if title else ""
    head, _, rest = text.partition(">")
    return f'{head} role="img" stroke-linejoin="round"{family}>{name}{rest.strip()}\n'


def _tag(text: str, page: str) -> str:
    """One tag of matplotlib's SVG, short: no style attribute, no id that nothing refers to, two decimals."""
    if text.startswith("<image"):
        return re.sub(r"\n|xlink:", "", _plain_style(text))
    text = re.sub(r' id="(?![mp]\w{10}")[^"]*"| transform="rotate\(-0 [^"]*"| xmlns:xlink="[^"]*"', "", text)
    text = re.sub(r'(id="|href="#|url\(#)([mp]\w{10})', rf"\g<1>{page}\2", text.replace("xlink:href", "href"))
    text = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", re.sub(r"\s*\n\s*", " ", text))
    text = re.sub(r'="([\d.]+)pt"', r'="\1"', _plain_style(text))
    if page:
        text = re.sub(r"#[0-9a-f]{6}", lambda found: _variable(found[0]), text)
    return text


def _variable(colour: str) -> str:
    return f"var({VARIABLES[colour]}, {colour})" if colour in VARIABLES else colour


def _plain_style(tag: str) -> str:
    """A tag whose style attribute is spelled as attributes, without a font's family."""

    def spelled(found: re.Match[str]) -> str:
        pairs = dict(re.findall(r"([\w-]+):\s*([^;]*)", found[1]))
        return "".join(f' {key}="{value}"' for key, value in pairs.items() if key != "font-family")

    return re.sub(r' style="([^"]*)"', spelled, tag)


def to_png(figure: Figure) -> bytes:
    """A figure as a PNG file of two pixels a point."""
    buffer = io.BytesIO()
    with _style():
        figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure; the name's ending, .svg or .png, is the format."""
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path}: pictures are written as .svg or .png; end the name so")
    write_atomic(path, to_svg(figure).encode(errors="replace") if path.suffix == ".svg" else to_png(figure))
    return path
