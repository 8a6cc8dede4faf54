"""Threads that work on numbered tasks, and a watch that notices when one dies or hangs.

Decoding and resizing release Python's lock, so threads run in parallel and hand over pixels without
copying them between processes. A task is a small piece of a batch; results are collected by number.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fathoms.data.errors import LoaderError
from fathoms.errors import FathomsError

# How often the watch looks at the workers while it waits. A death is noticed within this time.
_LOOK_EVERY = 0.2


def available_cores() -> int:
    """CPU cores this process may use; a container or a scheduler may grant fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class WorkerState:
    """What one worker is doing; written by it, read by the watch."""

    name: str
    item: str = ""
    since: float = 0.0

    def begin(self, item: str) -> None:
        """Note the file the worker turns to now."""
        self.item, self.since = item, time.monotonic()

    def rest(self) -> None:
        """Note that the worker holds nothing."""
        self.item = ""


class WorkerPool:
    """Run `work(task, state)` on threads; `take()` gives (number, result) as they finish.

    Args:
        work: called in a worker; it reports each file with `state.begin`.
        count: number of threads.
        timeout: seconds that one file may take.
    """

    def __init__(self, work: Callable[[Any, WorkerState], Any], count: int, timeout: float) -> None:
        self._work, self._timeout = work, timeout
        self._tasks: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[int, Any, BaseException | None, str]] = queue.SimpleQueue()
        self._closed = False
        self.states = [WorkerState(f"data-worker-{i}") for i in range(count)]
        ready = threading.Barrier(count + 1)
        self.threads = [
            threading.Thread(target=self._run, args=(state, ready), name=state.name, daemon=True)
            for state in self.states
        ]
        threads_before = torch.get_num_threads()
        for thread in self.threads:
            thread.start()
        ready.wait()
        # A worker asks torch for one thread, its own. The setting is kept per thread, but the value
        # that later threads start from is shared: put that back.
        torch.set_num_threads(threads_before)

    def _run(self, state: WorkerState, ready: threading.Barrier) -> None:
        torch.set_num_threads(1)
        ready.wait()
        while True:
            entry = self._tasks.get()
            if entry is None or self._closed:
                return
            number, task = entry
            try:
                self._results.put((number, self._work(task, state), None, state.item))
            # Whatever ends a task must reach the consumer, or it would wait for ever.
            except BaseException as error:
                self._results.put((number, None, error, f"{state.name} at {state.item or 'no file'}"))
                if not isinstance(error, Exception):
                    return
            state.rest()

    def submit(self, number: int, task: Any) -> None:
        """Hand in a task."""
        self._tasks.put((number, task))

    def take(self) -> tuple[int, Any]:
        """Wait for the next finished task; raises within seconds if a worker died or hangs."""
        while True:
            try:
                number, result, error, place = self._results.get(timeout=_LOOK_EVERY)
            except queue.Empty:
                self._check()
                continue
            if isinstance(error, FathomsError):
                raise error
            if error is not None:
                raise LoaderError(
                    f"loader: {place} failed with {type(error).__name__}: {error}; remove or repair the file"
                ) from error
            return number, result

    def _check(self) -> None:
        now = time.monotonic()
        for thread, state in zip(self.threads, self.states, strict=True):
            item, since = state.item, state.since
            if not thread.is_alive():
                # Its last word may still lie in the queue; that says more than its silence.
                if self._results.empty():
                    raise LoaderError(
                        f"loader: {state.name} died at {item or 'no file'}; run again, it resumes from here"
                    )
            elif item and now - since > self._timeout:
                raise LoaderError(
                    f"loader: {state.name} has hung for {now - since:.1f} s at {item}; "
                    "check the disk, or raise the timeout"
                )

    def close(self) -> None:
        """Let the workers end; one that hangs is left behind as a daemon."""
        self._closed = True
        for _ in self.threads:
            self._tasks.put(None)
        deadline = time.monotonic() + 1.0
        for thread in self.threads:
            with contextlib.suppress(RuntimeError):
                thread.join(max(0.0, deadline - time.monotonic()))
