"""Standard streams that no print can fail on: odd names, a terminal that has been closed, a disk that is full."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from typing import Any


class _Stream(io.FileIO):
    """A stream whose failed writes are dropped, so that a run can go on, save and exit; the first is kept as `lost`.

    A reader that has gone away, as `| head` does, and a closed terminal lose nothing that somebody waits for.
    """

    lost: OSError | None = None

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(stream.fileno(), "wb", closefd=False)
        # A stream that nobody holds any more closes its file.
        self.stream = stream

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            # Of a terminal that has been closed, the signal decides the exit code.
            if error.errno not in (errno.EIO, errno.EPIPE):
                self.lost = self.lost or error
            return len(data)


def make_safe() -> None:
    """Replace standard output and error by streams that print names as escapes, and outlive their file or terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.flush()
        raw = _Stream(stream)
        options: dict[str, Any] = {"errors": "backslashreplace", "write_through": stream.write_through}
        # What PYTHONUNBUFFERED lets through at once must not wait in the buffer that is new here.
        options["line_buffering"] = stream.isatty() or stream.line_buffering or stream.write_through
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, **options))


def lost_output() -> str:
    """Why something that was printed to standard output is not there; "" if all of it is."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        return ""
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    raw = getattr(stream.buffer, "raw", None)
    lost = raw.lost if isinstance(raw, _Stream) else None
    return "" if lost is None else str(lost.strerror or lost)
