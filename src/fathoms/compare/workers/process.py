"""A worker process as its parent sees it: the pipe to it, its log, and why it died."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

GRACE = 120.0
"""Seconds that a worker has to save after a signal."""
POLL = 0.5
"""Seconds between looks at whether a silent worker is still there."""


class Worker:
    """One worker process.

    Args:
        log: File that gets what it prints, at its end.
        environment: Its environment.
    """

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self.log, self.done = log, 0
        self._file = log.open("ab")
        self._begin = self._file.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fathoms.compare.workers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            env=environment,
            # Ctrl-C reaches the parent, which passes it on once.
            start_new_session=True,
        )

    def ask(self, task: dict[str, Any]) -> dict[str, Any] | None:
        """The result of one task; None if the process died."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._line()
        self.done += 1
        return json.loads(line) if line.endswith(b"\n") else None

    def _line(self) -> bytes:
        """The next line of the pipe; empty once the process is dead, even if one that it forked holds the pipe."""
        pipe = self.process.stdout
        assert pipe is not None
        while True:
            dead = self.process.poll() is not None
            if select.select([pipe], [], [], 0 if dead else POLL)[0]:
                return pipe.readline()
            if dead:
                return b""

    def death(self) -> str:
        """Why the process died: its signal or code, and the last line it printed."""
        code = self.process.wait(GRACE)
        how = f"exit code {code}"
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            how += ", possibly out of memory" if -code == signal.SIGKILL else ""
        lines = self.log.read_bytes()[self._begin :][-4000:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its worker died ({how}){': ' + last[:300] if last else ''}"

    def signal(self, number: int) -> None:
        """Send a signal; SIGTERM asks for a checkpoint and an end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close(self) -> None:
        """End the process, which has nothing to do."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._file.close()
