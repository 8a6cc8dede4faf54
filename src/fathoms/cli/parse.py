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
from typing import Annotated, Any, Union

import tyro

from fathoms.errors import FathomsError
from fathoms.models.config import ViTConfig
from fathoms.registry import nearest


def parse(module: ModuleType, name: str, words: Sequence[str]) -> Any:
    """The `Args` of a command module from the words behind the command; a mistake raises FathomsError."""
    summary = (module.__doc__ or "").strip()
    said = io.StringIO()
    spell_unions(module.Args)
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                module.Args,
                prog=f"fathoms {name}",
                args=spell_out(words, module.Args, getattr(module, "ALIASES", {})),
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


def spell_unions(cls: type) -> None:
    """Write every `X | None` of a dataclass as typing's Union with None first, here and below.

    tyro looks into a Union by itself. For the same type with a bar, or where X is asked before None, it loads a
    type checker, which takes a fifth of the time that --help has.
    """
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        plain, extras = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
        if dataclasses.is_dataclass(plain):
            spell_unions(typing.cast(type, plain))
        options = typing.get_args(plain)
        if type(None) in options:
            made, noted = typing.cast(Any, Union), typing.cast(Any, Annotated)
            union = made[(None, *(option for option in options if option is not type(None)))]
            cls.__annotations__[name] = noted[(union, *extras)] if extras else union


def optional(cls: type, name: str, doc: str) -> Any:
    """A dataclass with every field of `cls` as an optional flag: what is not given is not changed."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    fields: list[Any] = []
    for field, hint in hints.items():
        help_text = tyro.conf.arg(help=docs[field], help_behavior_hint="")
        # A yes-or-no flag keeps its value: "not given" is a third state, which `spell_out` keeps apart.
        kind = Annotated[hint | None, help_text, tyro.conf.FlagConversionOff]
        fields.append((field, kind, dataclasses.field(default=None)))
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace={"__doc__": doc})


Switches: Any = optional(
    ViTConfig, "Switches", "Any field of ViTConfig; what is not given stays as the model has it."
)


def given(flags: Any) -> dict[str, Any]:
    """The optional flags that were given."""
    return {name: value for name, value in vars(flags).items() if value is not None}


def spell_out(words: Sequence[str], args: type, aliases: dict[str, str]) -> list[str]:
    """The words as the parser wants them: other spellings replaced, and optional yes-or-no flags with a value.

    `--amp` becomes `--amp True` and `--no-amp` becomes `--amp False` where "not given" is a third state.
    """
    flags = {f"--{name.replace('_', '-')}" for name in _optional_bools(args)}
    spelled: list[str] = []
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        word, equals, value = word.partition("=")
        word = aliases.get(word, word)
        if word in flags and not equals and after not in ("True", "False"):
            spelled += [word, "True"]
        elif word.startswith("--no-") and f"--{word[5:]}" in flags:
            spelled += [f"--{word[5:]}", "False"]
        else:
            spelled.append(word + equals + value)
    return spelled


def _optional_bools(args: type) -> set[str]:
    names: set[str] = set()
    for field, hint in typing.get_type_hints(args).items():
        if dataclasses.is_dataclass(hint):
            names |= _optional_bools(hint)
        elif set(typing.get_args(hint)) == {bool, type(None)}:
            names.add(field)
    return names
