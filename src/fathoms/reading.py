"""Read what a stranger may have written: plain files of a bounded size, and values of the declared type.

Nothing here runs what it reads. TOML and JSON give plain values; a config class says which values it takes.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import reprlib
import stat
import tomllib
import types
import typing
import unicodedata
from pathlib import Path
from typing import Any, Literal

from fathoms.errors import FathomsError
from fathoms.registry import check_name

# A recipe or a config is a page of text. A megabyte is a mistake or an attack.
MAX_TOML = 1 << 20
_MAX_DOTS = 100
# The manifest of a million pictures takes 150 MB.
MAX_JSON = 1 << 30
# Whole numbers and texts beyond these are in no config.
MAX_INT = 10**9
MAX_TEXT = 4096
# Classes of one data set; ImageNet-21k has 21,843.
MAX_CLASSES = 1_000_000
MAX_NAME = 255
# Unicode's controls, halves of surrogates (bytes that are no text), and line separators.
_CONTROL = ("Cc", "Cs", "Zl", "Zp")


def read_plain(path: str | Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes.

    A pipe would make the reader wait for ever, a device could give bytes without end; both are an `OSError`
    here, as a file that is too large is.
    """
    # Without O_NONBLOCK the open itself would wait for somebody to write into a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        if about.st_size > most:
            raise OSError(errno.EFBIG, f"its {about.st_size} bytes are more than {most}", str(path))
        return file.read(about.st_size)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_toml(path: str | Path, error: type[FathomsError]) -> dict[str, Any]:
    """The table in a TOML file, or `error` with the file's name."""
    try:
        text = read_plain(path, MAX_TOML).decode("utf-8")
        _check_dots(text)
        return tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as fault:
        raise error(f"{path}: no readable TOML ({_reason(fault)}); mend the file") from fault


def _check_dots(text: str) -> None:
    """Refuse a key such as a.a.a.a and so on: Python's parser takes time with the square of its length."""
    chain = 0
    for piece in text.split("."):
        chain = 0 if any(sign in piece for sign in "\n=,") else chain + 1
        if chain > _MAX_DOTS:
            raise ValueError(f"a key of more than {_MAX_DOTS} parts")


def read_json(path: str | Path, error: type[FathomsError], most: int = MAX_JSON) -> dict[str, Any]:
    """The object in a JSON file, or `error` with the file's name; NaN and infinities are not JSON."""
    try:
        value = json.loads(read_plain(path, most).decode("utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as fault:
        raise error(f"{path}: not readable as JSON ({_reason(fault)}); make it again") from fault
    if not isinstance(value, dict):
        raise error(f"{path}: a JSON object is expected; make it again")
    return value


def check_names(names: Any, where: str, error: type[FathomsError]) -> tuple[str, ...]:
    """The names of classes, as a tuple; what is no list of plain names is an error.

    A name is printed, logged, and written into tables, so control characters and undecodable bytes are refused
    where it enters.
    """
    if not isinstance(names, list | tuple) or not 1 <= len(names) <= MAX_CLASSES:
        raise error(f"{where}: holds no list of 1 to {MAX_CLASSES} class names; check the file")
    for name in names:
        if not isinstance(name, str) or not len(name) <= MAX_NAME:
            raise error(f"{where}: class {reprlib.repr(name)} is no name of up to {MAX_NAME} characters")
        if not name.isprintable() and any(unicodedata.category(letter) in _CONTROL for letter in name):
            raise error(f"{where}: class {name!r} has control characters in its name; rename it")
    return tuple(names)


def read_names(path: str | Path, error: type[FathomsError] = FathomsError) -> tuple[str, ...]:
    """The class names in a text file, one a line; empty lines are left out."""
    try:
        text = read_plain(path, MAX_CLASSES * MAX_NAME).decode("utf-8")
    except (OSError, ValueError) as fault:
        raise error(
            f"{path}: no readable list of names ({_reason(fault)}); give one a line, in UTF-8"
        ) from fault
    lines = (line.strip(" \t\r") for line in text.split("\n"))
    return check_names([line for line in lines if line], str(path), error)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _reason(fault: BaseException) -> str:
    if isinstance(fault, RecursionError):
        return "nested too deeply"
    if isinstance(fault, OSError):
        return fault.strerror or type(fault).__name__
    return " ".join(str(fault).split())[:160]


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
        raise error(f"{_named(where, name)}={reprlib.repr(value)} {fault}")


def check_choices(config: Any, where: str) -> None:
    """Hold every choice (`Literal`) of a config to its list; another value is an error with the nearest one."""
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
