"""Threads that work on numbered tasks, and a watch that replaces one that dies or hangs.

Decoding and resizing release Python's lock, so threads run in parallel and hand over pixels without
copying them between processes. A task is a small piece of a batch; results are collected by number.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fathoms.data.errors import LoaderError
from fathoms.errors import FathomsError

# How often the watch looks at the workers while it waits. A death is noticed within this time.
LOOK_EVERY = 0.2


def available_cores() -> int:
    """CPU cores this process may use; a container or a scheduler may grant fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def give_way() -> None:
    """Ask the scheduler not to interrupt another thread for this one.

    A worker that wakes up with work to do would push the training loop off its core, and the loop would have to
    wait for a core each time it has waited for Python's lock. Shares of time stay equal: nothing starves.
    """
    if hasattr(os, "SCHED_BATCH"):
        # A container may forbid it, and then only the speed suffers.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Worker:
    """One thread, the task it holds, and what it is doing; written by the thread, read by the watch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread: threading.Thread | None = None
        self.entry: tuple[int, Any] | None = None
        self.item = ""
        self.since = 0.0
        self.replaced = False

    def begin(self, item: str) -> None:
        """Note the file the worker turns to now."""
        self.item, self.since = item, time.monotonic()

    def trouble(self, timeout: float) -> str:
        """What is wrong with it; empty if nothing is."""
        where = f"at {self.item or 'no file'}"
        if self.thread is not None and not self.thread.is_alive():
            return f"{self.name} died {where}"
        spent = time.monotonic() - self.since
        if self.entry is not None and self.item and spent > timeout:
            return f"{self.name} has hung for {spent:.1f} s {where}"
        return ""


class WorkerPool:
    """Run `work(task, worker)` on threads; `take()` gives (number, result) as they finish.

    A worker that dies or hangs is replaced once, and its task is done again by another: tasks are pure
    functions, so nothing changes but the time. The second such accident ends the run with an error.

    Args:
        work: called in a worker; it reports each file with `worker.begin`.
        count: number of threads.
        timeout: seconds that one file may take.
        replaced: told in a sentence about a worker that had to be replaced.
    """

    def __init__(
        self,
        work: Callable[[Any, Worker], Any],
        count: int,
        timeout: float,
        replaced: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._work, self._timeout, self._tell = work, timeout, replaced
        self._tasks: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Worker, int, Any, FathomsError | None]] = queue.SimpleQueue()
        self._closed = False
        self._accidents = 0
        self.workers = [Worker(f"data-worker-{i}") for i in range(count)]
        self._start(self.workers)

    def _start(self, workers: list[Worker]) -> None:
        ready = threading.Barrier(len(workers) + 1)
        threads_before = torch.get_num_threads()
        for worker in workers:
            worker.thread = threading.Thread(
                target=self._run, args=(worker, ready), name=worker.name, daemon=True
            )
            worker.thread.start()
        ready.wait()
        # A worker asks torch for one thread, its own. The setting is kept per thread, but the value
        # that later threads start from is shared: put that back.
        torch.set_num_threads(threads_before)

    def _run(self, worker: Worker, ready: threading.Barrier) -> None:
        torch.set_num_threads(1)
        give_way()
        ready.wait()
        while not worker.replaced:
            entry = self._tasks.get()
            if entry is None or self._closed:
                return
            worker.begin("")
            worker.entry = entry
            try:
                result, error = self._work(entry[1], worker), None
            except FathomsError as failure:
                result, error = None, failure
            except Exception as failure:
                # Whatever ends a task must reach the consumer, or it would wait for ever. The file is named
                # here: by the time the consumer looks, the worker is at another.
                result, error = None, at_a_file(worker.name, worker.item, failure)
            self._results.put((worker, entry[0], result, error))
            worker.entry = None

    def submit(self, number: int, task: Any) -> None:
        """Hand in a task."""
        self._tasks.put((number, task))

    def take(self) -> tuple[int, Any]:
        """Wait for the next finished task; a worker that died or hangs is noticed within its time."""
        while True:
            try:
                worker, number, result, error = self._results.get(timeout=LOOK_EVERY)
            except queue.Empty:
                self._watch()
                continue
            if worker.replaced:
                # It came back after all; another has its task.
                continue
            if error is not None:
                raise error
            return number, result

    def _watch(self) -> None:
        for place, worker in enumerate(self.workers):
            trouble = worker.trouble(self._timeout)
            # A result that already lies in the queue says more than the silence after it.
            if not trouble or not self._results.empty():
                continue
            self._accidents += 1
            if self._accidents > 1:
                raise LoaderError(lost_again(trouble))
            worker.replaced = True
            self._tell(replacing(trouble))
            self.workers[place] = Worker(worker.name)
            self._start([self.workers[place]])
            if worker.entry is not None:
                self._tasks.put(worker.entry)

    def close(self) -> None:
        """Let the workers end; one that hangs is left behind as a daemon."""
        self._closed = True
        for _ in self.workers:
            self._tasks.put(None)
        deadline = time.monotonic() + 1.0
        for worker in self.workers:
            if worker.thread is not None:
                worker.thread.join(max(0.0, deadline - time.monotonic()))


def at_a_file(name: str, item: str, failure: Exception) -> LoaderError:
    """What ended a task, with the worker and the file it was at."""
    error = LoaderError(
        f"loader: {name} at {item or 'no file'} failed with "
        f"{type(failure).__name__}: {failure}; remove or repair the file"
    )
    error.__cause__ = failure
    return error


def replacing(trouble: str) -> str:
    """What is said of the first worker that is lost."""
    return f"loader: {trouble}; another worker takes its place and does its task again"


def lost_again(trouble: str) -> str:
    """What is said of the second."""
    return (
        f"loader: {trouble}, and a worker was replaced before; check the disk and the memory, "
        "then run again: it resumes from here"
    )
