"""Fingerprints of file-backed splits: names, sizes and labels, and the first and last bytes of every file.

A file that is replaced by another of the same size counts as changed, and a copied or moved data set does not. Twelve
microseconds a file; of many files the result is kept in the user's cache folder, under a digest of their stamps (time
of change and inode), so that the files are opened once.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

from fathoms.data.sources.base import Source, describe, digest_lines
from fathoms.files.atomic import write_atomic
from fathoms.files.cache_folder import cache_folder

EDGE = 4096
"""Bytes at the start and at the end of a file that count; all of a file of up to twice as many."""
MANY = 20_000
"""Files from which on the result is kept, and several are opened at a time: a network's delays add up."""
_AT_A_TIME = 8
# A file may change twice within one tick of the clock of its file system.
_SETTLED = 2_000_000_000


def by_content(source: Source, edges: Callable[[int], bytes], stamps: Iterable[os.stat_result]) -> str:
    """The fingerprint of a split.

    Args:
        source: The split.
        edges: The first and last bytes of an image; an `OSError` counts as a content of its own.
        stamps: Status of every file that holds the images.
    """
    if len(source) < MANY:
        return _digest(source, (_seen(edges, index) for index in range(len(source))))
    found = list(stamps)
    lines = [f"{s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino} {s.st_dev}" for s in found]
    path = cache_folder("fingerprints") / digest_lines([describe(source), *lines])
    with contextlib.suppress(OSError, ValueError):
        kept = path.read_text("ascii")
        if len(kept) == 64:
            return kept
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        made = _digest(source, pool.map(lambda index: _seen(edges, index), range(len(source)), chunksize=256))
    if max(s.st_ctime_ns for s in found) < time.time_ns() - _SETTLED:
        # Where the folder cannot be written, the files are read again next time.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, made.encode())
    return made


def earlier_fingerprint(source: object) -> str:
    """The fingerprint that earlier versions stored: of names, sizes and labels only; for other kinds the same."""
    own = getattr(source, "earlier_fingerprint", None)
    return own() if own is not None else source.fingerprint()  # pyrefly: ignore[missing-attribute]


def edges_of(path: str) -> bytes:
    """The first and last bytes of a regular file."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{path}: it is not a regular file")
        return edges_at(descriptor, 0, about.st_size)
    finally:
        os.close(descriptor)


def edges_at(descriptor: int, offset: int, size: int) -> bytes:
    """The first and last bytes of `size` bytes at an offset of an open file."""
    first = os.pread(descriptor, min(size, EDGE), offset)
    rest = min(size - len(first), EDGE)
    return first if rest <= 0 else first + os.pread(descriptor, rest, offset + size - rest)


def _seen(edges: Callable[[int], bytes], index: int) -> str:
    try:
        return sha256(edges(index)).hexdigest()
    except OSError:
        return "cannot be read"


def _digest(source: Source, seen: Iterable[str]) -> str:
    return digest_lines(["content-1", describe(source), *seen])
