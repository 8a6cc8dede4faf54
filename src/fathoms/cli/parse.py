"""Flags of a command, and what is wrong with them in one line."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any

import tyro

from fathoms.errors import FathomsError
from fathoms.models.config import ViTConfig
from fathoms.registry import nearest


def parse(module: ModuleType, name: str, words: Sequence[str]) -> Any:
    """The `Args` of a command module from the words behind the command; a mistake raises FathomsError."""
    summary = (module.__doc__ or "").strip()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                module.Args,
                prog=f"fathoms {name}",
                args=list(words),
                description=f"{summary}\n\nexamples:\n{textwrap.indent(module.EXAMPLES.strip(), '  ')}",
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            sys.stdout.flush()
            raise
        raise FathomsError(one_line(said.getvalue())) from None


def one_line(boxed: str) -> str:
    """The sentence inside the parser's framed message, with the nearest valid choice."""
    lines = [line.strip("│ ").strip() for line in boxed.splitlines() if line[:1] not in "╭╰"]
    text = " ".join(line for line in lines if line and set(line) != {"─"})
    text = re.sub(r"For full helptext, (run|see) .*", "", text).strip()
    choice = re.search(r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?)\)", text)
    if choice:
        options = re.findall(r"'([^']*)'", choice[3])
        return f"{choice[2]}: no value is called {choice[1]!r}; did you mean {nearest(choice[1], options)!r}?"
    unknown = re.search(r"Unrecognized options: (\S+?),? (?:.*?Perhaps you meant: (\S+))?", text + " ")
    if unknown:
        meant = re.search(r"Perhaps you meant: (?:\S+, )?(--\S+)", text)
        hint = f"did you mean {meant[1]!r}?" if meant else "see --help"
        return f"no option is called {unknown[1]!r}; {hint}"
    value = re.search(r"Error parsing (\S+): no type matching (\S+) could .*? from \['?(.*?)'?\]", text)
    if value:
        return f"{value[1]}: {value[3]!r} is no {value[2].lower()}; see --help"
    return text or "the arguments cannot be read; see --help"


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    docs: dict[str, str] = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, after in itertools.pairwise(statements):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                docs[name] = str(text)
    return docs


def _switches() -> type:
    """A dataclass with every field of ViTConfig as an optional flag: what is not given is not changed."""
    hints, docs = typing.get_type_hints(ViTConfig), field_docs(ViTConfig)
    fields: list[Any] = []
    for name, hint in hints.items():
        help_text = tyro.conf.arg(help=docs[name], help_behavior_hint="")
        fields.append((name, Annotated[hint | None, help_text], dataclasses.field(default=None)))
    doc = "Any field of ViTConfig; what is not given stays as the model has it."
    return dataclasses.make_dataclass("Switches", fields, frozen=True, namespace={"__doc__": doc})


Switches = _switches()


def overrides(switches: Any) -> dict[str, Any]:
    """The switches that were given."""
    return {name: value for name, value in vars(switches).items() if value is not None}
