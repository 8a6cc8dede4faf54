"""One HTML file that loads nothing: a template with its style, script and data, and a policy that runs nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from fathoms.errors import printable
from fathoms.plotting.style import to_svg
from fathoms.report.records import clipped, file_size, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
VENDOR = Path(__file__).parent / "vendor"


def fill(
    template: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: Any,
    reload: int = 0,
    images: bool = False,
    **values: Any,
) -> str:
    """A template with its style sheets, scripts and data, each joined into one element.

    Args:
        template: Its file name.
        styles: Style sheets, by file name.
        scripts: Scripts, by file name.
        data: What the scripts read, as JSON.
        reload: Seconds after which the page reads its file again; 0: never.
        images: Whether the page holds images, as data inside of it.
        values: Names in the template.
    """
    style, script = _joined(styles), _joined(scripts)
    return (
        _environment()
        .get_template(template)
        .render(
            style=Markup(style),
            script=Markup(script),
            policy=policy(style, script, images),
            data=Markup(embedded(data)),
            reload=reload,
            **values,
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "href": href,
        "size": file_size,
        "soft": soft,
        "words": words,
        "clip": clipped,
        "shown": shown,
    }
    return environment


@functools.cache
def _file(name: str) -> str:
    folder = VENDOR if name.startswith("uPlot") else TEMPLATES
    return (folder / name).read_text(encoding="utf-8").strip()


def _joined(names: Sequence[str]) -> str:
    return "\n".join(_file(name) for name in names)


def href(name: str) -> str:
    """A file name in a link; bytes of it that are not UTF-8 are kept."""
    return quote(os.fsencode(name))


def soft(text: Any) -> Markup:
    """A text that may be broken after its separators, so that it is never broken inside a word.

    >>> soft("drop_path<")
    Markup('drop_<wbr>path&lt;')
    """
    pieces = re.split(r"(?<=\w[_/-])(?=\w)|(?<=\w[.,:])(?=[^\W\d])", printable(str(text)))
    return Markup("<wbr>").join(escape(piece) for piece in pieces)


def words(command: Any) -> Markup:
    """A command whose words stay whole where lines are broken; browsers break after a hyphen."""
    return Markup(" ").join(
        Markup('<span class="w">{}</span>').format(word) for word in str(command).split(" ")
    )


def embedded(value: Any) -> str:
    """JSON that cannot close the script element around it."""
    return (
        json.dumps(value, allow_nan=False, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )


def embedded_figure(key: str, figure: Figure, narrow: Figure | None = None) -> Markup:
    """A figure inside a page, and the one that takes its place on a phone."""
    wide = f'<div class="picture">{to_svg(figure, page=f"{key}-")}</div>'
    if narrow is None:
        return Markup(wide)
    return Markup(f'{wide}<div class="picture narrow">{to_svg(narrow, page=f"{key}-n-")}</div>')


def policy(style: str, script: str, images: bool = False) -> str:
    """A content security policy under which this style and this script run and nothing is loaded."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; "
        + ("img-src data:; " if images else "")
        + "base-uri 'none'; form-action 'none'"
    )
