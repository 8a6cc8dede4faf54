"""Parse the flags of a command with tyro; a mistake is an error of one line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
import typing
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, Union

import tyro
import tyro._errors

from fathoms.cli.parse_errors import one_line
from fathoms.errors import FathomsError
from fathoms.models.config import ViTConfig

# tyro's type of what `tyro.conf.arg` returns.
_ARG = type(tyro.conf.arg())


def parse(module: ModuleType, name: str, words: Sequence[str]) -> Any:
    """The `Args` of a command module from the words after the command; a mistake raises FathomsError."""
    summary = (module.__doc__ or "").strip()
    annotate(module.Args)
    spelled = spell_out(words, module.Args, getattr(module, "ALIASES", {}))

    def refuse(event: tyro._errors.ParseErrorEvent) -> None:
        raise FathomsError(one_line(event, spelled, flags_of(module.Args)))

    try:
        with tyro._errors.on_parse_error(refuse):
            return tyro.cli(
                module.Args,
                prog=f"fathoms {name}",
                args=spelled,
                description=f"{summary}\n\nexamples:\n{textwrap.indent(module.EXAMPLES.strip(), '  ')}",
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
            )
    except SystemExit:
        sys.stdout.flush()
        raise


def flags_of(cls: type) -> list[str]:
    """Every flag of a dataclass of arguments, nested dataclasses included."""
    flags: list[str] = []
    for name, hint in typing.get_type_hints(cls).items():
        flags += flags_of(hint) if dataclasses.is_dataclass(hint) else [f"--{name.replace('_', '-')}"]
    return flags


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


def annotate(cls: type) -> None:
    """Rewrite the annotations of a dataclass for tyro, in nested dataclasses too.

    `X | None` becomes typing's Union with None first, which tyro resolves itself; otherwise it loads a type
    checker, which takes a fifth of the time allowed for --help. A default of None is not shown, since the help
    text says what it stands for, and a positional argument is shown under its name.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        kind, extras = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
        if dataclasses.is_dataclass(kind):
            annotate(typing.cast(type, kind))
            continue
        options = typing.get_args(kind)
        if type(None) in options:
            kind = typing.cast(Any, Union)[
                (None, *(option for option in options if option is not type(None)))
            ]
        if not any(isinstance(extra, _ARG) for extra in extras):
            positional, default = tyro.conf.Positional in extras, defaults[name]
            # A flag without a value says what it does; that it is off by default goes without saying.
            plain = default is None or isinstance(default, bool) or _is_many(options)
            hint_text = "" if plain else None
            metavar = _metavar(name, options, positional, default)
            extras = (*extras, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint_text))
        cls.__annotations__[name] = typing.cast(Any, Annotated)[(kind, *extras)]


def _metavar(name: str, options: tuple[Any, ...], positional: bool, default: Any) -> str | None:
    """How a value is called in the help text; None leaves that to the parser."""
    many, word = _is_many(options), name.upper()
    if not positional:
        return "NAME [NAME ...]" if many else None
    if many:
        return f"{word} ..."
    return word if default is dataclasses.MISSING else f"[{word}]"


def _is_many(options: tuple[Any, ...]) -> bool:
    """Whether a flag takes any number of values."""
    return ... in options or any(... in typing.get_args(option) for option in options)


def optional(cls: type, name: str, doc: str) -> Any:
    """A dataclass with every field of `cls` as an optional flag; a flag that is not given is None."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    fields: list[Any] = []
    for field, hint in hints.items():
        help_text = tyro.conf.arg(help=docs[field], help_behavior_hint="")
        # A boolean flag takes a value here: "not given" is a third state, which `spell_out` handles.
        kind = Annotated[hint | None, help_text, tyro.conf.FlagConversionOff]
        fields.append((field, kind, dataclasses.field(default=None)))
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace={"__doc__": doc})


Switches: Any = optional(ViTConfig, "Switches", "Any field of ViTConfig; default: the model's own.")


def given(flags: Any) -> dict[str, Any]:
    """The optional flags that were given."""
    return {name: value for name, value in vars(flags).items() if value is not None}


def spell_out(words: Sequence[str], args: type, aliases: dict[str, str]) -> list[str]:
    """The words as the parser takes them: aliases replaced, and optional boolean flags given a value.

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
