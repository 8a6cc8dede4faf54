"""Type checks of config values: every field of a dataclass against its annotation."""

from __future__ import annotations

import functools
import math
import reprlib
import types
import typing
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from fathoms.errors import ConfigError, FathomsError
from fathoms.registry import check_name

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


@dataclass(frozen=True)
class Range:
    """Bounds of a number; `above` and `below` are excluded."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def advice(self, value: float) -> str:
        """The bound that a value violates, as advice; "" if it is inside."""
        if self.least is not None and not value >= self.least:
            return f"use {self.least:.10g} or more"
        if self.most is not None and not value <= self.most:
            return f"use {self.most:.10g} or less"
        if self.above is not None and not value > self.above:
            return f"use a number above {self.above:.10g}"
        return (
            f"use a number below {self.below:.10g}"
            if self.below is not None and not value < self.below
            else ""
        )


def ranged(default: Any, **bounds: float) -> Any:
    """A field of a dataclass with a default and the bounds of `Range`, which `check_ranges` reads."""
    return field(default=default, metadata={"range": Range(**bounds)})


def check_ranges(config: Any, where: str) -> None:
    """Check every number of a config against the bounds of its field; None is not checked."""
    for each in fields(config):
        value, bounds = getattr(config, each.name), each.metadata.get("range")
        if bounds is None or value is None:
            continue
        if not math.isfinite(value):
            raise ConfigError(f"{_named(where, each.name)}={value} is not finite")
        if advice := bounds.advice(value):
            raise ConfigError(f"{_named(where, each.name)} {value}: {advice}")


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


def as_declared(config: type, name: str, value: Any) -> Any:
    """A value as a flag of that field would give it: a float for a whole number, a tuple for a list."""
    return _as(value, _hints(config)[name])


def _as(value: Any, hint: Any) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        fitting = [option for option in inner if not _fault(value, option)]
        return _as(value, fitting[0]) if fitting else value
    if origin is tuple and isinstance(value, tuple | list) and len(value) == len(inner):
        return tuple(_as(v, h) for v, h in zip(value, inner, strict=True))
    return float(value) if hint is float and type(value) is int else value


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
