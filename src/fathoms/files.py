"""Files: written whole or not at all; values as JSON and CSV allow them; the nearest path to one that is missing."""

from __future__ import annotations

import difflib
import errno
import itertools
import math
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from fathoms.errors import ConfigError, FathomsError

_ELSEWHERE = "through it files elsewhere would change"


def refuse_links(root: Path, path: Path) -> Path:
    """The path, which lies below `root`; one that is a link, or is reached through one, is an error.

    What a link points to is not `root`'s: nothing there may be deleted, emptied or written.
    """
    for place in (path, *path.parents):
        if place == root:
            return path
        if place.is_symlink():
            raise ConfigError(f"{place}: is a link, and {_ELSEWHERE}; remove it")
    raise ValueError(f"{path} is not below {root}")


def open_own(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file that is about to be written, as `open` does; one that is a link is an error.

    Every file that is written under a name which others can foresee is opened here.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    try:
        return open(path, mode, opener=opener, **options)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path}: is a link, and {_ELSEWHERE}; remove it") from error
        raise


def check_absent(paths: Iterable[Path], overwrite: bool) -> None:
    """Refuse to replace files that are there already, unless `overwrite` says so."""
    for path in paths:
        if not overwrite and (path.exists() or path.is_symlink()):
            raise FathomsError(f"{path}: is there already; give another name, or --overwrite to replace it")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file in the folder of `path` that replaces `path` at the end of the block, or is removed on an error.

    Its name is new each time, so that two processes never write to the same file; its suffix is that of `path`,
    which some writers look at. Errors name `path`, and its mode follows the umask whoever writes it.
    """
    temporary = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        with _naming(path, temporary):
            temporary.touch()
            mode = temporary.stat().st_mode
            yield temporary
            # Some writers make a file of their own, which only its owner may read.
            temporary.chmod(mode)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path, temporary: Path) -> Iterator[None]:
    """Let errors name the file that the user gave, not the temporary one."""
    try:
        yield
    except FathomsError as error:
        if temporary.name not in str(error):
            raise
        raise type(error)(str(error).replace(temporary.name, path.name)) from error
    except OSError as error:
        if error.filename is not None and Path(str(error.filename)).name == temporary.name:
            error.filename = str(path)
        raise


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path`; a crash leaves the old file or none, never a partial one."""
    with replacing(path) as temporary, open_own(temporary, "wb") as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Entries of a folder that are looked at; a folder of a million images is not listed for a misspelt name.
_MOST = 10_000
_LONGEST = 500
# Two names are alike from here on: one letter of three may differ.
ALIKE = 0.66


def nearest_path(path: str | Path) -> Path | None:
    """The existing path nearest to one that does not exist, part by part; None where a part is like no entry."""
    path = Path(path)
    if not path.parts or len(str(path)) > _LONGEST or "\0" in str(path):
        return None
    here = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if os.path.lexists(here / part):
            here = here / part
            continue
        found = _alike(here, part)
        if found is None:
            return None
        here = here / found
    return here


def _alike(folder: Path, name: str) -> str | None:
    """The entry of a folder most like a name: one that begins with it, or the most alike."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, _MOST))
    except OSError:
        return None
    longer = [entry for entry in names if len(name) > 2 and entry.lower().startswith(name.lower())]
    near = difflib.get_close_matches(name, names, n=3, cutoff=ALIKE)
    # Two names are not alike because both end in .txt.
    near = [entry for entry in near if _stems_alike(name, entry)]
    return next(iter([*longer, *near]), None)


def _stems_alike(name: str, entry: str) -> bool:
    return difflib.SequenceMatcher(None, Path(name).stem, Path(entry).stem).ratio() >= ALIKE


def missing(path: str | Path, otherwise: str, kind: str = "file or folder") -> str:
    """Words on a path that does not exist: the nearest one, or else what to do."""
    if os.path.islink(path):  # noqa: PTH114 - unlike Path's, false for a name too long to exist
        return f"{path}: is a link that leads nowhere; fix it, or give the file itself"
    near = nearest_path(path)
    advice = otherwise if near is None else f"did you mean {str(near)!r}?"
    shown = str(path)
    # The system takes no longer name than this.
    shown = shown if len(shown) <= _LONGEST else f"{shown[:60]}…"
    return f"{shown}: no such {kind}; {advice}"


FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Signs that begin a formula, or that a spreadsheet skips before one."""


def inert(value: Any) -> Any:
    """The value of a cell; a text that a spreadsheet would run gets a quote in front. Numbers stay numbers.

    >>> inert("=1+1"), inert("-0.5"), inert(-0.5), inert("cat")
    ("'=1+1", '-0.5', -0.5, 'cat')
    """
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


T = TypeVar("T")


def finite(value: T) -> T | None:
    """The value; None for NaN and infinity.

    >>> finite(0.5), finite(float("nan")), finite("inf")
    (0.5, None, 'inf')
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cache_folder(name: str) -> Path:
    """The folder of one kind of cache, which may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fathoms" / name
