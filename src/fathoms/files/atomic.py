"""Atomic file writes: to a temporary file in the same folder, flushed, then renamed over the target.

A command asks `check_absent` first: it replaces a file only if the user said so.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fathoms.errors import FathomsError


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
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
