"""Standard streams that no print can fail on: names that are not UTF-8, and a terminal that has been closed."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any


class _Terminal(io.FileIO):
    """A terminal; what is written after it has been closed is dropped, so that a run can save and exit."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def make_safe() -> None:
    """Replace standard output and error by streams that print names as escapes, and outlive their terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if stream.isatty():
            stream.flush()
            raw = _Terminal(stream.fileno(), "wb", closefd=False)
            setattr(
                sys,
                name,
                io.TextIOWrapper(
                    io.BufferedWriter(raw), stream.encoding, errors="backslashreplace", line_buffering=True
                ),
            )
        else:
            stream.reconfigure(errors="backslashreplace")
