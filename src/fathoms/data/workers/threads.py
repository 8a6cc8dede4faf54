"""Decoding threads: a pool for numbered tasks, and the threads of a loader.

Decoding and resizing release the GIL, so threads run in parallel and hand over pixels without copying them
between processes. A task is a small part of a batch; results come back in any order, with their number.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fathoms.data.crop.transforms import Chunk
from fathoms.data.stats import LoaderStats
from fathoms.data.workers.shared_memory import own_memory
from fathoms.data.workers.task import Task, TaskRunner
from fathoms.data.workers.watch import CHECK_EVERY, Watch, describe_trouble, task_error
from fathoms.errors import FathomsError


def lower_priority() -> None:
    """Ask the scheduler not to preempt another thread for this one.

    A worker that wakes up would push the training loop off its core, and the loop would have to wait for a core
    each time it has waited for the GIL. Shares of CPU time stay equal: nothing starves.
    """
    if hasattr(os, "SCHED_BATCH"):
        # A container may forbid it, and then only the speed suffers.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Worker:
    """One thread, its task and the file it reads; written by the thread, read by the watch."""

    def __init__(self, name: str, results_wait: Callable[[], bool] = lambda: False) -> None:
        self.name = name
        self.thread: threading.Thread | None = None
        self.entry: tuple[int, Any] | None = None
        self.item = ""
        self.since = 0.0
        self.retired = False
        self._results_wait = results_wait

    def begin(self, item: str) -> None:
        """Note the file that the worker reads now."""
        self.item, self.since = item, time.monotonic()

    def trouble(self, timeout: float) -> str:
        """The fault of the worker; empty if there is none."""
        died = self.thread is not None and not self.thread.is_alive()
        spent = time.monotonic() - self.since
        hangs = self.entry is not None and self.item and spent > timeout
        trouble = describe_trouble(self.name, self.item, died, spent if hangs else None)
        # A result that waits in the queue may be its own.
        return "" if trouble and self._results_wait() else trouble

    def retire(self) -> None:
        """Drop whatever it still delivers; a thread cannot be killed."""
        self.retired = True


class ThreadPool:
    """Run `work(task, worker)` on threads; `take()` returns (number, result) as tasks finish.

    A worker that dies or hangs is replaced once; see `fathoms.data.workers.watch`.

    Args:
        work: called in a worker; it reports each file with `worker.begin`.
        count: number of threads.
        timeout: seconds that one file may take.
        report: called with one sentence about a worker that was replaced.
    """

    def __init__(
        self,
        work: Callable[[Any, Worker], Any],
        count: int,
        timeout: float,
        report: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._work, self._watch = work, Watch(timeout, report)
        self._tasks: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Worker, int, Any, FathomsError | None]] = queue.SimpleQueue()
        self._closed = False
        self.workers = [self._new_worker(f"data-worker-{i}") for i in range(count)]
        self._start(self.workers)

    def _new_worker(self, name: str) -> Worker:
        return Worker(name, lambda: not self._results.empty())

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

    def submit(self, number: int, task: Any) -> None:
        """Queue a task."""
        self._tasks.put((number, task))

    def _run(self, worker: Worker, ready: threading.Barrier) -> None:
        torch.set_num_threads(1)
        lower_priority()
        ready.wait()
        while not worker.retired:
            entry = self._tasks.get()
            if entry is None or self._closed:
                return
            worker.begin("")
            worker.entry = entry
            try:
                result, error = self._work(entry[1], worker), None
            except FathomsError as failure:
                result, error = None, failure
            except Exception as failure:  # noqa: BLE001
                # Whatever ends a task must reach the consumer, or it would wait for ever. The file is named
                # here: by the time the consumer looks, the worker reads another.
                result, error = None, task_error(worker.name, worker.item, failure)
            self._results.put((worker, entry[0], result, error))
            worker.entry = None

    def take(self) -> tuple[int, Any]:
        """Wait for the next finished task; a worker that died or hangs is noticed within its time."""
        while True:
            try:
                worker, number, result, error = self._results.get(timeout=CHECK_EVERY)
            except queue.Empty:
                self._watch.check(self.workers, self._replace)
                continue
            if worker.retired:
                # It came back after all; another has its task.
                continue
            if error is not None:
                raise error
            return number, result

    def _replace(self, worker: Worker) -> Worker:
        successor = self._new_worker(worker.name)
        self._start([successor])
        if worker.entry is not None:
            self._tasks.put(worker.entry)
        return successor

    def close(self) -> None:
        """Let the workers end; one that hangs stays as a daemon thread."""
        self._closed = True
        for _ in self.workers:
            self._tasks.put(None)
        deadline = time.monotonic() + 1.0
        for worker in self.workers:
            if worker.thread is not None:
                worker.thread.join(max(0.0, deadline - time.monotonic()))


class Threads:
    """The threads of a loader; they live for one epoch."""

    def __init__(
        self, run: TaskRunner, count: int, timeout: float, stats: LoaderStats, allowed_bad: int, pin: bool
    ) -> None:
        allocate = own_memory(pin)

        def work(task: Task, worker: Worker) -> Chunk:
            return run(
                task, worker.begin, lambda name, reason: stats.note_bad(name, reason, allowed_bad), allocate
            )

        self._pool = ThreadPool(work, count, timeout, stats.note_accident)

    def submit(self, number: int, task: Task) -> None:
        """Queue a task."""
        self._pool.submit(number, task)

    def take(self) -> tuple[int, Chunk]:
        """Wait for the next finished task."""
        return self._pool.take()

    def reuse(self, numbers: Iterable[int], event: torch.cuda.Event | None) -> None:
        """Do nothing: every task has memory of its own."""

    def finish(self) -> None:
        """End the threads: the epoch is over, or was left."""
        self._pool.close()
