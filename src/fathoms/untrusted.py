"""Reading of untrusted files: regular files of a bounded size, as TOML, JSON, JSON lines or lists of names.

Nothing here runs what it reads: TOML and JSON give plain values, which `config_checks` holds to their types.
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

from fathoms.errors import ConfigError, FathomsError, reason

# A recipe or a config is a page of text. A megabyte is a mistake or an attack.
MAX_TOML = 1 << 20
_MAX_DOTS = 100
# The manifest of a million images takes 150 MB.
MAX_JSON = 1 << 30
# The JSON beside a model holds the names of all classes.
MAX_CARD = 64 << 20
# Classes of one data set; ImageNet-21k has 21,843.
MAX_CLASSES = 1_000_000
MAX_NAME = 255
# Unicode's control characters, surrogates (undecodable bytes), and line separators.
_CONTROL = ("Cc", "Cs", "Zl", "Zp")


def read_plain(path: str | Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes.

    A pipe would block the reader for ever, a device could give bytes without end. Both raise an `OSError` here,
    as does a file that is too large.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if about.st_size > most:
            raise OSError(errno.EFBIG, f"its {about.st_size} bytes are more than {most}", str(path))
        return file.read(about.st_size)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as a hexadecimal string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_toml(path: str | Path, error: type[FathomsError]) -> dict[str, Any]:
    """The table in a TOML file; `error` is raised with the file's name."""
    try:
        text = read_plain(path, MAX_TOML).decode("utf-8")
        _check_dots(text)
        table = tomllib.loads(text)
        _check_integers(table)
        return table
    except (OSError, ValueError, RecursionError) as fault:
        raise error(f"{path}: not readable as TOML ({reason(fault)}); correct the file") from fault


def _check_dots(text: str) -> None:
    """Refuse a long key such as a.a.a.a.a: Python's parser takes time quadratic in its length."""
    chain = 0
    for piece in text.split("."):
        chain = 0 if any(sign in piece for sign in "\n=,") else chain + 1
        if chain > _MAX_DOTS:
            raise ValueError(f"a key of more than {_MAX_DOTS} parts")


def _check_integers(value: Any) -> None:
    """Refuse an integer of more than 64 bits, TOML's limit: Python does not even print one of 5,000 digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError("an integer of more than 64 bits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(inner)


def read_json(
    path: str | Path, error: type[FathomsError], most: int = MAX_JSON, remedy: str = "create it again"
) -> dict[str, Any]:
    """The object in a JSON file; `error` is raised with the file's name and the remedy. NaN is not JSON."""
    try:
        value = json.loads(read_plain(path, most).decode("utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as fault:
        raise error(f"{path}: not readable as JSON ({reason(fault)}); {remedy}") from fault
    if not isinstance(value, dict):
        raise error(f"{path}: a JSON object is expected; {remedy}")
    return value


def has_control(name: str) -> bool:
    r"""Whether a name holds control characters, line separators or undecodable bytes.

    >>> has_control("a b"), has_control("a\nb"), has_control("a\udcff")
    (False, True, True)
    """
    return not name.isprintable() and any(unicodedata.category(letter) in _CONTROL for letter in name)


def check_names(names: Any, where: str, error: type[FathomsError]) -> tuple[str, ...]:
    """Check a list of class names and return it as a tuple.

    Names are printed, logged and written into tables, so control characters and undecodable bytes are refused
    here, where they come in.
    """
    if not isinstance(names, list | tuple) or not 1 <= len(names) <= MAX_CLASSES:
        raise error(f"{where}: does not hold a list of 1 to {MAX_CLASSES} class names; check the file")
    for name in names:
        if not isinstance(name, str) or not len(name) <= MAX_NAME:
            raise error(f"{where}: class {reprlib.repr(name)} is not a name of up to {MAX_NAME} characters")
        if has_control(name):
            raise error(f"{where}: class {name!r} has control characters in its name; rename it")
    return tuple(names)


def read_names(path: str | Path, error: type[FathomsError] = FathomsError) -> tuple[str, ...]:
    """The class names in a text file, one per line; empty lines are skipped."""
    try:
        text = read_plain(path, MAX_CLASSES * MAX_NAME).decode("utf-8")
    except (OSError, ValueError) as fault:
        raise error(
            f"{path}: not readable as a list of names ({reason(fault)}); write one per line, in UTF-8"
        ) from fault
    lines = (line.strip(" \t\r") for line in text.split("\n"))
    return check_names([line for line in lines if line], str(path), error)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


Row = dict[str, Any]

MOST_EPOCHS = 1e15


def read_lines(path: Path) -> list[Row]:
    """The objects of a .jsonl file; a last line without a newline is still being written, or was cut by a kill."""
    if not path.is_file():
        return []
    try:
        whole = read_plain(path, MAX_JSON).decode("utf-8", errors="replace").split("\n")[:-1]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)})") from error
    return [
        _object(line, f"{path}: line {index}") for index, line in enumerate(whole, start=1) if line.strip()
    ]


def _object(text: str, where: str) -> Row:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as JSON ({reason(error)})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: is not a JSON object")
    return value


def epoch_of(row: Row, otherwise: float = 0.0) -> float:
    """The epoch of a row, counted from 1.

    >>> epoch_of({"epoch": 3}), epoch_of({"epoch": "x"})
    (3.0, 0.0)
    """
    epoch = row.get("epoch")
    if not isinstance(epoch, int | float) or isinstance(epoch, bool) or not abs(epoch) <= MOST_EPOCHS:
        return otherwise
    return float(epoch)
