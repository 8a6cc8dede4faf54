"""Type checks of config values: every field of a dataclass against its annotation."""

from __future__ import annotations

import functools
import math
import reprlib
import types
import typing
from typing import Any, Literal

from fathoms.errors import FathomsError
from fathoms.registry import check_name

# Larger whole numbers and longer texts occur in no config.
MAX_INT = 10**9
MAX_TEXT = 4096


@functools.cache
def _hints(config: type) -> dict[str, Any]:
    return typing.get_type_hints(config)


def check_types(config: Any, where: str, error: type[FathomsError]) -> None:
    """Hold every field of a config to its declared type; whole numbers and texts have a limit too.

    Annotations are not looked at when a dataclass is built, so a file could put a text where a number belongs
    and fail far from its cause. A choice (`Literal`) only has to be a text here: who knows the choices names
    the nearest one.
    """
    for name in _hints(type(config)):
        check_field(type(config), name, getattr(config, name), where, error)


def check_field(config: type, name: str, value: Any, where: str, error: type[FathomsError]) -> None:
    """Hold one value to the declared type of a config's field."""
    fault = _fault(value, _hints(config)[name])
    if fault:
        raise error(f"{where}.{name}={reprlib.repr(value)} {fault}")


def check_choices(config: Any, where: str) -> None:
    """Hold every choice (`Literal`) of a config to its list; another value is an error with the nearest one."""
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        for option in (hint, *typing.get_args(hint)):
            if typing.get_origin(option) is Literal and value is not None:
                check_name(value, typing.get_args(option), "value", f"{where}.{name}")


def _fault(value: Any, hint: Any) -> str:
    """What is wrong with a value for a type, or ""."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        faults = [_fault(value, option) for option in inner]
        return "" if "" in faults else faults[0]
    if origin is tuple:
        if not isinstance(value, tuple | list) or len(value) != len(inner):
            return f"is no list of {len(inner)} values"
        return next((fault for v, h in zip(value, inner, strict=True) if (fault := _fault(v, h))), "")
    if origin is Literal:
        return "" if isinstance(value, str) else "is no name"
    if hint is type(None):
        return "" if value is None else "is not empty"
    if hint is bool:
        return "" if isinstance(value, bool) else "is neither true nor false"
    if hint is str:
        fits = isinstance(value, str) and len(value) <= MAX_TEXT
        return "" if fits else f"is no text of up to {MAX_TEXT} characters"
    if hint is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return _size_fault(value) if whole else "is no whole number"
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return _size_fault(value) if number else "is no number"
    return ""


def _size_fault(value: int | float) -> str:
    if isinstance(value, int):
        return "" if abs(value) <= MAX_INT else f"is larger than {MAX_INT}"
    return "" if math.isfinite(value) else "is not finite"
