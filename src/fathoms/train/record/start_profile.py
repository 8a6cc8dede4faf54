"""A profile of the start of a run: seconds from the command to the first update, and of what happens once.

Importing this file does not import torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.files.atomic import write_atomic
from fathoms.text_table import aligned

if TYPE_CHECKING:
    import torch


def age_of_process() -> float:
    """Seconds since this process was started, to a hundredth; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class StartProfile:
    """Phases of a run's start, in their order, with the seconds of each.

    Recording costs a look at the clock. Only if somebody asks for the profile does a phase end with a wait for the
    device, so that its work is counted there.
    """

    def __init__(self) -> None:
        self.began = time.monotonic() - age_of_process()
        self.wait: Callable[[], None] | None = None
        self.rows: dict[str, tuple[float, float]] = {}
        self._last = self.began

    def wait_for(self, device: torch.device) -> None:
        """Wait for a device at the end of each phase from now on."""
        if device.type == "cuda":
            import torch

            self.wait = lambda: torch.cuda.synchronize(device)

    def mark(self, name: str) -> None:
        """End the phase that began at the last mark; a name is taken once."""
        if name in self.rows:
            return
        if self.wait is not None:
            self.wait()
        now = time.monotonic()
        self.rows[name], self._last = (now - self._last, now - self.began), now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside, the first time that it does."""
        if name in self.rows:
            yield
            return
        if self.wait is not None:
            self.wait()
        began = time.monotonic()
        yield
        if self.wait is not None:
            self.wait()
        now = time.monotonic()
        self.rows[name] = now - began, now - self.began

    def to_json(self) -> dict[str, Any]:
        """Seconds of each phase, when it ended, and what of them the compiler took."""
        rows = {name: {"seconds": took, "ended": ended} for name, (took, ended) in self.rows.items()}
        return {"phases": rows, "compiling": compile_seconds()}

    def write(self, folder: Path) -> None:
        """Print the table, and write start.json into a run folder."""
        write_atomic(folder / "start.json", json.dumps(self.to_json(), indent=1).encode() + b"\n")
        print(self.table(), file=sys.stderr, flush=True)

    def table(self) -> str:
        """The phases as a table."""
        rows = [[name, f"{took:.2f}", f"{ended:.2f}"] for name, (took, ended) in self.rows.items()]
        lines = aligned(["phase", "seconds", "since the command"], rows)
        return f"{lines}\nof these torch.compile took {compile_seconds():.2f} s"


def compile_seconds() -> float:
    """Seconds that torch's compiler has spent in this process; 0 if it was never loaded."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))
