"""One-line messages for mistakes on the command line, from tyro's parse-error events."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from typing import Any

import tyro._errors

from fathoms.errors import flag_of, reason
from fathoms.registry import hint, meant_by

ALIKE = 0.7
"""Two names of options are alike from here on; the nearest of a hundred is otherwise far-fetched."""
KINDS = {"INT": "whole number", "FLOAT": "number"}
"""Words for tyro's names of types."""


def one_line(
    event: tyro._errors.ParseErrorEvent,
    words: Sequence[str],
    flags: Sequence[str],
    positionals: Sequence[str] = (),
) -> str:
    """The message for a mistake that tyro reports, with the nearest valid name where there is one.

    Args:
        event: The mistake.
        words: The arguments that were parsed.
        flags: Every flag of the command.
        positionals: Names of its arguments without a flag.
    """
    errors = tyro._errors
    if isinstance(event, errors.InvalidChoice):
        return _no_such_value(_name(event.argument), event.value, event.choices)
    if isinstance(event, errors.UnrecognizedArgs):
        return _unknown(event.tokens[0], flags, positionals)
    if isinstance(event, errors.MissingArgs):
        if event.unrecognized_tokens:
            return _unknown(event.unrecognized_tokens[0], flags, positionals)
        missing = ", ".join(_name(found.arg) for found in event.missing_arguments)
        return f"{missing}: required, and not given; see --help"
    if isinstance(event, errors.BadValue):
        return f"{_name(event.argument)}: takes a value, and none is given; see --help"
    if isinstance(event, errors.InstantiationFailure):
        return _bad_value(event, words)
    return "the arguments cannot be parsed; see --help"


def _no_such_value(flag: str, value: str, choices: Sequence[str]) -> str:
    # None stands for "not given" and is not typed; tyro's choices are in no fixed order.
    return f"{flag}: no value is called {value!r}; {hint(value, sorted(set(choices) - {'None'}))}"


def _name(argument: Any) -> str:
    """A flag as it is typed, or the name of a positional argument."""
    if argument.is_positional():
        return str(argument.field.intern_name).upper()
    return str(argument.lowered.name_or_flags[0])


def _unknown(word: str, flags: Sequence[str], positionals: Sequence[str]) -> str:
    if not word.startswith("-"):
        return f"{word!r} is one argument too many; see --help"
    word = word.partition("=")[0]
    name = word.lstrip("-").replace("-", "_")
    options = [flag.removeprefix("--").replace("-", "_") for flag in flags]
    meant = meant_by(name, [*options, *positionals])
    if meant in positionals or name in positionals:
        return f"no option is called {word!r}; give {(meant or name).upper()} without a flag"
    near = [meant] if meant else difflib.get_close_matches(name, options, n=1, cutoff=ALIKE)
    advice = f"did you mean {flag_of(near[0])!r}?" if near else "see --help"
    return f"no option is called {word!r}; {advice}"


def _bad_value(event: tyro._errors.InstantiationFailure, words: Sequence[str]) -> str:
    """The message for a value of the wrong type, such as a word where a number is expected."""
    argument = event.argument
    if argument is None or argument.is_positional():
        return f"{'' if argument is None else f'{_name(argument)}: '}{reason(ValueError(event.message))}; see --help"
    flag = _name(argument)
    after = itertools.dropwhile(lambda word: word.partition("=")[0] != flag, words)
    first = next(after, "")
    typed = [first.partition("=")[2]] if "=" in first else []
    typed += itertools.takewhile(lambda word: not word.startswith("--"), after)
    expected = str(argument.lowered.metavar).strip("{}").split()
    if len(expected) == 1 and "," in expected[0] and len(typed) == 1:
        return _no_such_value(flag, typed[0], expected[0].split(","))
    kind = KINDS.get(expected[0], expected[0]) if expected else "value"
    wanted = f"a {kind}" if len(expected) == 1 else f"{len(expected)} {kind}s"
    return f"{flag}: {' '.join(typed[: len(expected)])!r} is not {wanted}; see --help"
