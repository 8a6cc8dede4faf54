"""Type checks of config values: every field of a dataclass against its annotation."""

from __future__ import annotations

import functools
import math
import reprlib
import types
import typing
from typing import Any, Literal

from fathoms.errors import FathomsError
from fathoms.names.registry import check_name

# No config holds a larger integer or a longer string.
MAX_INT = 10**9
MAX_TEXT = 4096


OFF_WORDS = ("none", "None", "off")
"""Words that switch an option off, in flags and files, where the option may be None."""


def takes_off(hint: Any) -> bool:
    """Whether `none` switches an option of this type off: it may be None, and none of its names is "none".

    A boolean is switched off with its own --no-...
    """
    options = typing.get_args(hint)
    if typing.get_origin(hint) not in (typing.Union, types.UnionType) or type(None) not in options:
        return False
    return bool not in options and not any("none" in typing.get_args(option) for option in options)


@functools.cache
def _hints(config: type) -> dict[str, Any]:
    return typing.get_type_hints(config)


def check_types(config: Any, where: str, error: type[FathomsError]) -> None:
    """Check every field of a config against its declared type; integers and strings have a limit too.

    A dataclass does not check annotations, so a file could put a string where a number belongs and fail far
    from the cause. A choice (`Literal`) only has to be a string here; its registry, or `check_choices`, raises
    with the nearest one.

    Args:
        config: A dataclass.
        where: Prefix of the field's name in errors: "" for none, "--" for the flag, "a" for "a.field".
        error: The class to raise.
    """
    for name in _hints(type(config)):
        check_field(type(config), name, getattr(config, name), where, error)


def check_field(config: type, name: str, value: Any, where: str, error: type[FathomsError]) -> None:
    """Check one value against the declared type of a config's field."""
    fault = _fault(value, _hints(config)[name])
    if fault:
        raise error(f"{_named(where, name)}={reprlib.repr(value)} {fault}")


def check_choices(config: Any, where: str) -> None:
    """Check every choice (`Literal`) of a config; another value is an error that names the nearest one."""
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        for option in (hint, *typing.get_args(hint)):
            if typing.get_origin(option) is Literal and value is not None:
                check_name(value, typing.get_args(option), "value", _named(where, name))


def _named(where: str, name: str) -> str:
    """A field as its user knows it: the argument, the flag, or with the name of its table."""
    if where.endswith("--"):
        return where + name.replace("_", "-")
    return f"{where}.{name}" if where else name


def _fault(value: Any, hint: Any) -> str:
    """The fault of a value for a type, or ""."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        faults = [_fault(value, option) for option in inner]
        return "" if "" in faults else faults[0]
    if origin is tuple:
        if not isinstance(value, tuple | list) or len(value) != len(inner):
            return f"is not a list of {len(inner)} values"
        return next((fault for v, h in zip(value, inner, strict=True) if (fault := _fault(v, h))), "")
    if origin is Literal:
        return "" if isinstance(value, str) else "is not a name"
    if hint is type(None):
        return "" if value is None else "is not empty"
    if hint is bool:
        return "" if isinstance(value, bool) else "is neither true nor false"
    if hint is str:
        fits = isinstance(value, str) and len(value) <= MAX_TEXT
        return "" if fits else f"is not a string of up to {MAX_TEXT} characters"
    if hint is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return _size_fault(value) if whole else "is not a whole number"
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return _size_fault(value) if number else "is not a number"
    return ""


def _size_fault(value: int | float) -> str:
    if isinstance(value, int):
        return "" if abs(value) <= MAX_INT else f"is larger than {MAX_INT}"
    return "" if math.isfinite(value) else "is not finite"
