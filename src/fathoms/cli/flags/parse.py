"""Parse the flags of a command with tyro; a mistake is an error of one line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union

import tyro
import tyro._errors

from fathoms.cli.flags.parse_errors import one_line
from fathoms.config_checks import OFF_WORDS, takes_off
from fathoms.errors import ConfigError, FathomsError, flag_of
from fathoms.models.config import ViTConfig
from fathoms.text_table import WIDTH, wrapped

# tyro's type of what `tyro.conf.arg` returns.
_ARG = type(tyro.conf.arg())


def parse(module: Any, name: str, words: Sequence[str]) -> Any:
    """The `Args` of a command module from the words after the command; a mistake raises FathomsError."""
    annotate(module.Args)
    shown = module.Args
    if {"-h", "--help", ALL} & set(words):
        # Of a command that does not say which flags those are, its own: not the groups that commands share.
        hints = typing.get_type_hints(shown, include_extras=True)
        own = [name for name, hint in hints.items() if not dataclasses.is_dataclass(hint)]
        shown = shown if ALL in words else _of_use(shown, getattr(module, "USUAL", own))
        print(_about(module, name, len(names_of(module.Args)[0]) - len(names_of(shown)[0])))
        words = ["--help"]
    spelled = spell_out(words, module.Args, getattr(module, "ALIASES", {}))
    spelled, switched_off = take_off(spelled, module.Args)

    def refuse(event: tyro._errors.ParseErrorEvent) -> None:
        raise FathomsError(one_line(event, spelled, *names_of(module.Args)))

    try:
        with tyro._errors.on_parse_error(refuse):
            args = tyro.cli(
                shown,
                prog=f"fathoms {name}",
                args=spelled,
                description="",
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
            )
            holders = {
                holder: dataclasses.replace(getattr(args, holder), **dict.fromkeys(names, OFF))
                for holder, names in switched_off.items()
            }
            return dataclasses.replace(args, **holders) if holders else args
    except SystemExit:
        sys.stdout.flush()
        raise


def _about(module: Any, name: str, more: int) -> str:
    """What a command does, with examples; `more` flags are not in the help text."""
    parts = [
        textwrap.fill(" ".join(part.split()), WIDTH)
        for part in inspect.cleandoc(module.__doc__ or "").split("\n\n")
    ]
    examples = [" \\\n".join(wrapped(f"  {line}", 4)) for line in module.EXAMPLES.strip().splitlines()]
    parts += [
        "\n".join(["examples:", *examples]),
        *([f"{more} more flags: fathoms {name} {ALL}"] if more else []),
    ]
    return "\n\n".join([*parts, ""])


def _of_use(cls: type, usual: Sequence[str]) -> type:
    """A dataclass of these fields alone, taken out of their groups, for the help text."""
    fields: dict[str, Any] = {}

    def look(group: type) -> None:
        hints = typing.get_type_hints(group, include_extras=True)
        for each in dataclasses.fields(group):
            hint = hints[each.name]
            if dataclasses.is_dataclass(hint):
                look(typing.cast(type, hint))
            elif each.name in usual:
                how = {"default": each.default} if each.default is not dataclasses.MISSING else {}
                fields[each.name] = (each.name, hint, dataclasses.field(**how))

    look(cls)
    return dataclasses.make_dataclass("Args", [fields[name] for name in usual])


def parse_settings(module: Any, command: str, settings: Mapping[str, Any]) -> Any:
    """The `Args` of a command with these options.

    Option and value are one word: as two, a boolean would be taken as given, and its value as an argument.
    """
    args = parse(module, command, [f"{flag_of(name)}={value}" for name, value in settings.items()])
    for positional in names_of(module.Args)[1]:
        if left := getattr(args, positional):
            raise ConfigError(f"{left!r} is the value of no option; leave it out")
    return args


def parse_setting(module: Any, command: str, setting: tuple[str, str], flag: str) -> Any:
    """The `Args` of a command with one option of an axis; a mistake names the flag and the value that were typed."""
    name, value = setting
    try:
        return parse_settings(module, command, {name: value})
    except FathomsError as error:
        reason = str(error).removeprefix(f"{flag_of(name)}: ")
        raise ConfigError(f"{flag} {name}={value}: {reason}") from error


def names_of(cls: type) -> tuple[list[str], list[str]]:
    """The flags of a dataclass of arguments, nested dataclasses included, and its arguments without a flag."""
    flags: list[str] = []
    positionals: list[str] = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            flags += names_of(typing.cast(type, hint))[0]
        elif tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            positionals.append(name)
        else:
            flags.append(flag_of(name))
    return flags, positionals


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    docs: dict[str, str] = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, after in itertools.pairwise(statements):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                docs[name] = " ".join(str(text).split())
    return docs


def annotate(cls: type) -> None:
    """Rewrite the annotations of a dataclass for tyro, in nested dataclasses too.

    `X | None` becomes typing's Union with None first, which tyro resolves itself; otherwise it loads a type
    checker, which takes a fifth of the time allowed for --help. A default of None or of no values is not shown, since
    the help text says what it stands for, and a positional argument is shown under its name, in brackets if optional.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    docs: dict[str, str] = {}
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
            docs = docs or field_docs(cls)
            about = tyro.conf.arg(metavar=metavar, help=docs[name], help_behavior_hint=hint_text)
            extras = (*extras, about)
        cls.__annotations__[name] = typing.cast(Any, Annotated)[(kind, *extras)]


ALL = "--help-all"

METAVARS = {
    **dict.fromkeys(("axis", "tune"), "NAME=VALUE,VALUE"),
    **dict.fromkeys(("plan", "config", "scores", "page"), "FILE"),
    **dict.fromkeys(("budget", "by"), "TIME"),
    **dict.fromkeys(("model", "recipe", "preset", "experiment"), "NAME"),
    "arm": "NAME:OPTION=VALUE,…",
    "seeds": "N[,N…]",
    "keep_arms": "ARMS@SEEDS",
    "shard": "K/N",
    "slurm": "NAME=VALUE,…",
    "output": "FOLDER",
    "initial_checkpoint": "RUN|FILE",
    "progressive_size": "EPOCH:SIZE,…",
    "freeze": "PATTERN,…",
    "log": "NAME,…",
}
"""How a value is written, of flags that take a text."""

OFF = "none"
"""Value of an optional flag that was switched off, in the place of its own."""


def _metavar(name: str, options: tuple[Any, ...], positional: bool, default: Any) -> str | None:
    """How a value is called in the help text; None leaves that to the parser."""
    many, word = _is_many(options), name.upper()
    if not positional:
        return METAVARS.get(name, "NAME [NAME ...]" if many else None)
    if many:
        return f"{word} ..."
    return word if default is dataclasses.MISSING else f"[{word}]"


def _is_many(options: tuple[Any, ...]) -> bool:
    """Whether a flag takes any number of values."""
    return ... in options or any(... in typing.get_args(option) for option in options)


def optional(cls: type, name: str, doc: str, shows_defaults: bool = False) -> Any:
    """A dataclass with every field of `cls` as an optional flag; a flag that is not given is None.

    A field of `cls` that may be None can be set to it again: `--aa none`, where a recipe has a policy.
    """
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    plain = {field.name: field.default for field in dataclasses.fields(cls)}
    fields: list[Any] = []
    for field, hint in hints.items():
        shown = shows_defaults and plain[field] not in (None, False)
        hint_text = f"(default: {plain[field]})" if shown else ""
        metavar = _metavar(field, typing.get_args(hint), False, None)
        help_text = tyro.conf.arg(help=docs[field], help_behavior_hint=hint_text, metavar=metavar)
        # A boolean flag takes a value here: "not given" is a third state, which `spell_out` handles.
        kind = Annotated[hint | None, help_text, tyro.conf.FlagConversionOff]
        fields.append((field, kind, dataclasses.field(default=None)))
    can_be_off = frozenset(field for field, hint in hints.items() if takes_off(hint))
    namespace = {"__doc__": doc, "CAN_BE_OFF": can_be_off}
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace=namespace)


def take_off(words: Sequence[str], args: type) -> tuple[list[str], dict[str, list[str]]]:
    """The words without flags that are switched off (`--aa none`), and those flags by the field that holds them."""
    holders = {
        flag_of(name): (holder, name)
        for holder, hint in typing.get_type_hints(args).items()
        for name in getattr(hint, "CAN_BE_OFF", ())
    }
    kept: list[str] = []
    taken: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if not equals and rest:
            value = rest[0]
        if flag in holders and value in OFF_WORDS:
            holder, name = holders[flag]
            taken.setdefault(holder, []).append(name)
            rest = rest if equals else rest[1:]
        else:
            kept.append(word)
    return kept, taken


Switches: Any = optional(ViTConfig, "Switches", "Any field of ViTConfig; default: the model's own.")


def given(flags: Any) -> dict[str, Any]:
    """The optional flags that were given; None for one that was switched off."""
    off = type(flags).CAN_BE_OFF
    return {
        name: None if value == OFF and name in off else value
        for name, value in vars(flags).items()
        if value is not None
    }


def merged(flags: Any, over: Any) -> Any:
    """Optional flags, with those that are given in `over` in their place."""
    return dataclasses.replace(
        flags, **{name: value for name, value in vars(over).items() if value is not None}
    )


def spell_out(words: Sequence[str], args: type, aliases: dict[str, str]) -> list[str]:
    """The words as the parser takes them: aliases replaced, and optional boolean flags given a value.

    An alias of "" stands for an argument without a flag. `--amp` becomes `--amp True` and `--no-amp` becomes `--amp
    False` where "not given" is a third state.
    """
    flags = set(map(flag_of, _optional_bools(args)))
    spelled: list[str] = []
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        # A word that begins with "=" is a value.
        word, equals, value = word.partition("=") if not word.startswith("=") else (word, "", "")
        word = aliases.get(word, word)
        if not word:
            spelled += [value] if equals else []
        elif word in flags and not equals and after not in ("True", "False"):
            spelled += [word, "True"]
        elif word.startswith("--no-") and f"--{word[5:]}" in flags and not equals:
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
