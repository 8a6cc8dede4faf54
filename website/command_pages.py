"""The page of the commands, docs/commands.md: every flag with its values, default and help text, from the parsers."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any, Literal

import tyro

from doc_format import table
from fathoms.cli.flags.parse import Switches, field_docs
from fathoms.cli.main import COMMANDS, module_of
from fathoms.cli.train import ALIASES, RecipeFlags, RunFlags
from fathoms.errors import flag_of
from fathoms.models.config import ViTConfig
from fathoms.training.job import RunOptions
from fathoms.training.recipe import Recipe

SHARED = {
    RunOptions: ("Options of the run", RunOptions),
    RunFlags: ("Options of the run", RunOptions),
    RecipeFlags: ("Options of training", Recipe),
    Switches: ("Options of the model", ViTConfig),
}
"""Groups of flags that several commands share: heading, and the class that has the defaults."""
NOT_RUN = "<!-- not run: the examples of --help; the pages of the jobs have their own -->"


def pages() -> dict[str, str]:
    """The text of the page, by its file name under docs/."""
    rows = [
        [f"[`fathoms {name}`](#fathoms-{name.replace(' ', '-')})", summary]
        for name, summary in COMMANDS.items()
    ]
    text = (
        "# Command line\n\n`fathoms COMMAND --help` prints the same. Exit codes: 0 success, 2 a mistake in the "
        "command or its files, 130 Ctrl-C; longer lists are on the pages of [training](training.md) and "
        "[comparing](compare.md).\n\n<!-- written by website/generate.py from the parsers -->\n\n"
        f"{table(['command', 'does'], rows)}\n\n"
    )
    return {"commands.md": text + "\n".join(map(_section, COMMANDS))}


def _section(name: str) -> str:
    module = module_of(name)
    about, examples = inspect.cleandoc(module.__doc__ or ""), module.EXAMPLES.strip()
    lines = [f"## fathoms {name}", "", about, "", NOT_RUN, "", "```bash", examples, "```", ""]
    head = ["flag", "values", "default", "meaning"]
    own, groups = [], []
    for field, (hint, extras) in _hints(module.Args).items():
        if hint in SHARED:
            groups.append(hint)
        elif dataclasses.is_dataclass(hint):
            own += _rows(typing.cast(type, hint), typing.cast(type, hint))
        else:
            own.append(_row(module.Args, module.Args, field, hint, extras))
    lines += [table(head, own), ""] if own else []
    for group in groups:
        heading, defaults = SHARED[group]
        if name == "train":
            lines += [f"### {heading}", "", table(head, _rows(group, defaults)), ""]
        else:
            anchor, words = heading.lower().replace(" ", "-"), heading[0].lower() + heading[1:]
            lines += [f"And the [{words}](#{anchor}), as in `fathoms train`.", ""]
    if name == "train":
        other = [
            [f"`{alias}`", f"`{flag}`" if flag else "DATA, without a flag"] for alias, flag in ALIASES.items()
        ]
        lines += ["### Other names", "", "Names of timm and its forks that are taken as they are:", ""]
        lines += [table(["flag", "means"], other), ""]
    return "\n".join(lines)


def _hints(cls: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Type and annotations of each field."""
    found = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        kind, extras = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
        found[name] = (kind, extras)
    return found


def _rows(cls: type, defaults: type) -> list[list[str]]:
    return [_row(cls, defaults, field, hint, extras) for field, (hint, extras) in _hints(cls).items()]


def _row(cls: type, defaults: type, field: str, hint: Any, extras: tuple[Any, ...]) -> list[str]:
    """Flag, values, default and meaning of one field."""
    docs = field_docs(defaults)
    default = next(each.default for each in dataclasses.fields(defaults) if each.name == field)
    flag = flag_of(field)
    if tyro.conf.Positional in extras:
        flag = field.upper()
    elif default is True and cls is defaults:
        # A flag without a value, and on unless it is given.
        flag = flag_of(f"no_{field}")
    shown = "" if flag.startswith("--no-") else _default(default)
    return [f"`{flag}`", _values(hint), shown, " ".join(docs[field].split()).replace("|", "\\|")]


def _values(hint: Any) -> str:
    """Kind of value of a flag.

    >>> _values(Literal["a", "b"] | None), _values(tuple[float, float]), _values(bool)
    ('a, b', 'number number', '')
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = [each for each in (typing.get_args(hint) if is_union else (hint,)) if each is not type(None)]
    return " or ".join(filter(None, dict.fromkeys(map(_one, options))))


def _one(kind: Any) -> str:
    words = {int: "whole number", float: "number", str: "text", bool: ""}
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        return f"{_one(inner[0])} …" if ... in inner else " ".join(map(_one, inner))
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def _default(value: Any) -> str:
    if value is dataclasses.MISSING or value is None or value is False or value == ():
        return ""
    if value is True:
        return "on"
    return " ".join(f"{each:.4g}" for each in value) if isinstance(value, tuple) else f"{value}"
