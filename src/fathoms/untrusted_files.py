"""Read what a stranger may have written: plain files of a bounded size, and values of the declared type.

Nothing here runs what it reads. TOML and JSON give plain values; a config class says which values it takes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import reprlib
import stat
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

from fathoms.errors import FathomsError

# A recipe or a config is a page of text. A megabyte is a mistake or an attack.
MAX_TOML = 1 << 20
_MAX_DOTS = 100
# The manifest of a million pictures takes 150 MB.
MAX_JSON = 1 << 30
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
