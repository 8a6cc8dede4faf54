"""Docstrings as Markdown: examples fenced as code, arXiv numbers linked. An extension of griffe, which reads them."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
ARXIV = re.compile(r"(?<![\[/])arXiv:(\d{4}\.\d{4,5})")


def as_markdown(text: str) -> str:
    """A docstring with its examples fenced and its papers linked.

    >>> as_markdown("Paper: arXiv:2103.17239.")
    'Paper: [arXiv:2103.17239](https://arxiv.org/abs/2103.17239).'
    """
    fenced = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
    return ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", fenced)


class DocstringMarkdown(griffe.Extension):
    """Rewrite every docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class and function."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
