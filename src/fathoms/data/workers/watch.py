"""The watch that both worker pools share: replace the first worker that dies or hangs, stop the run at the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from fathoms.data.errors import LoaderError

# Seconds between two checks while a pool waits for results; a death is noticed within this time.
CHECK_EVERY = 0.2


@runtime_checkable
class Watched(Protocol):
    """A worker, thread or process, as the watch sees it."""

    def trouble(self, timeout: float) -> str:
        """The fault of the worker; empty if there is none."""
        ...

    def retire(self) -> None:
        """Make sure that nothing more comes from it."""
        ...


W = TypeVar("W", bound=Watched)


class Watch:
    """Count the workers that were lost. Tasks are pure functions: one that runs again changes nothing but the time.

    Args:
        timeout: seconds that one file may take.
        report: called with one sentence about a worker that was replaced.
    """

    def __init__(self, timeout: float, report: Callable[[str], None]) -> None:
        self.timeout, self._report, self._lost = timeout, report, 0

    def check(self, workers: list[W], replace: Callable[[W], W]) -> None:
        """Put what `replace` makes in the place of a worker in trouble; raise if it is not the first."""
        for place, worker in enumerate(workers):
            trouble = worker.trouble(self.timeout)
            if not trouble:
                continue
            self._lost += 1
            if self._lost > 1:
                raise LoaderError(
                    f"loader: {trouble}, and a worker was replaced before; check the disk and the memory, "
                    "then run again: it resumes from here"
                )
            worker.retire()
            self._report(f"loader: {trouble}; another worker takes its place and does its task again")
            workers[place] = replace(worker)

    def reset(self) -> None:
        """Forget what was lost: a new epoch begins."""
        self._lost = 0


def describe_trouble(name: str, item: str, died: bool, hung_for: float | None) -> str:
    """One clause on a worker that died, or that has spent `hung_for` seconds on one file; else empty."""
    where = f"at {item or 'no file'}"
    if died:
        return f"{name} died {where}"
    return "" if hung_for is None else f"{name} has hung for {hung_for:.1f} s {where}"


def task_error(name: str, item: str, failure: Exception) -> LoaderError:
    """The error that ended a task, with the worker and the file it was reading."""
    error = LoaderError(
        f"loader: {name} at {item or 'no file'} failed with "
        f"{type(failure).__name__}: {failure}; remove or repair the file"
    )
    error.__cause__ = failure
    return error
