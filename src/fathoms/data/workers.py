"""Decoding workers: tasks, the pool that hands them out and watches the workers, and threads.

Decoding and resizing release the GIL, so threads run in parallel and hand over pixels without copying them between
processes: on a CPU they make 1.06 to 1.14 times the images per CPU second of processes (results/worker_pools.md).
Beside a loop that launches work on a GPU they take the GIL from it, and `processes` feed it instead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from fathoms.data.augment.pipeline import Augment
from fathoms.data.images.crops import SampleReader
from fathoms.data.images.decode import Decoder
from fathoms.data.images.pixels import Allocate
from fathoms.data.images.transforms import Chunk, EvalTransform, ImageTransform, TrainTransform
from fathoms.data.sampler import LoaderStats, Refs
from fathoms.data.sources.source import LoaderError, Source
from fathoms.errors import FathomsError

# Seconds between two checks while a pool waits for results; a death is noticed within this time.
CHECK_EVERY = 0.2
# Tasks that a worker holds at most, and seconds to wait for the tasks of an epoch that was left.
_TASKS_AHEAD, _PATIENCE = 4, 2.0
# When a worker began with a file, and the end of that file's name.
_STATUS = np.dtype([("since", np.float64), ("length", np.int64), ("item", np.uint8, 1008)])


@dataclass(frozen=True)
class Task:
    """Samples that are decoded together, and their transform."""

    refs: Refs
    epoch: int
    transform: TrainTransform | EvalTransform | ImageTransform


class Done(NamedTuple):
    """Result of a task: its pixels, the bad images by name and reason, and the error that ended it."""

    chunk: Chunk | None
    bad: Sequence[tuple[str, str]]
    error: FathomsError | None = None


class Status:
    """The file that a worker reads, in memory that it shares with its parent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._status = np.frombuffer(mmap.mmap(-1, _STATUS.itemsize), _STATUS)

    def begin(self, item: str) -> None:
        """Note the file that the worker reads now; empty between files."""
        # The name of a file need not be valid text.
        data = np.frombuffer(item.encode(errors="backslashreplace")[-1008:], np.uint8)
        self._status["item"][0, : len(data)] = data
        self._status["length"], self._status["since"] = len(data), time.monotonic()

    @property
    def item(self) -> str:
        return bytes(self._status["item"][0, : int(self._status["length"][0])]).decode(errors="replace")

    @property
    def since(self) -> float:
        """When it began with that file; all processes share the monotonic clock."""
        return float(self._status["since"][0])


@dataclass(frozen=True)
class TaskRunner:
    """Run tasks in a worker; `augment` is None where the device augments."""

    source: Source
    decoder: Decoder
    augment: Augment | None

    def __call__(self, task: Task, status: Status, allocate: Allocate) -> Done:
        """Decode a task into memory from `allocate`; whatever ends it must reach the consumer, or it waits for ever."""
        bad: list[tuple[str, str]] = []
        chunk = error = None
        status.begin("")
        try:
            reader = SampleReader(
                self.source, self.decoder, status.begin, lambda name, why: bad.append((name, why))
            )
            chunk = task.transform(reader, task.refs, task.epoch, allocate)
            if self.augment is not None and chunk.images is not None:
                chunk.images.copy_(self.augment.colours(chunk.images, task.refs, task.epoch))
        except FathomsError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001
            # The file is named here: by the time the consumer looks, the worker reads another.
            error = LoaderError(
                f"loader: {status.name} at {status.item or 'no file'} failed with "
                f"{type(failure).__name__}: {failure}; remove or repair the file"
            )
            error.__cause__ = failure
        status.begin("")
        return Done(chunk if error is None else None, bad, error)


# The number of a task, the task, and the slot of memory for its result.
Entry = tuple[int, Task, int]


class Worker(ABC):
    """One worker as its pool sees it: its status, and the tasks that it has not finished, in order."""

    def __init__(self, name: str) -> None:
        self.status = Status(name)
        self.tasks: deque[Entry] = deque()
        self.head_since = 0.0
        """When the task at the head of its queue got there, in monotonic seconds."""

    def send(self, entry: Entry) -> None:
        self.head_since = self.head_since if self.tasks else time.monotonic()
        self.tasks.append(entry)

    @abstractmethod
    def died(self) -> bool: ...

    @abstractmethod
    def result_waits(self) -> bool:
        """Whether one of its results may not have been read yet."""

    @abstractmethod
    def retire(self) -> None:
        """Make sure that nothing more comes from it."""

    def trouble(self, timeout: float) -> str:
        """One clause on a worker that died, or that has spent more than `timeout` seconds on a file; else empty."""
        name, where = self.status.name, f"at {self.status.item or 'no file'}"
        if self.died():
            return f"{name} died {where}"
        # One that was stopped between two files reports none.
        spent = time.monotonic() - max(self.head_since, self.status.since)
        hangs = self.tasks and spent > timeout and not self.result_waits()
        return f"{name} has hung for {spent:.1f} s {where}" if hangs else ""


W = TypeVar("W", bound=Worker)


class Pool(ABC, Generic[W]):
    """Hands numbered tasks to workers, and gives their results by number.

    The first worker that dies or hangs is replaced; the second in an epoch ends the run. Tasks are pure functions: one
    that runs again changes nothing but the time. `timeout` is in seconds for one file.
    """

    def __init__(self, timeout: float, stats: LoaderStats, allowed_bad: int) -> None:
        self._timeout, self._stats, self._allowed_bad = timeout, stats, allowed_bad
        self.workers: list[W] = []
        self.busy = False
        """Whether an epoch uses it."""
        self._backlog: deque[Entry] = deque()
        self._ready: dict[int, Chunk] = {}
        self._lost = 0

    @abstractmethod
    def _start(self, name: str) -> W: ...

    @abstractmethod
    def _receive(self, seconds: float) -> tuple[W, int, Done] | None:
        """A worker, the number of the task at the head of its queue and its result; None if there is none in time."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the workers have ended."""

    @abstractmethod
    def close(self) -> None: ...

    def _slot(self, _number: int) -> int:
        return 0

    def reuse(self, numbers: Iterable[int], event: torch.cuda.Event | None) -> None:
        """Use the memory of some tasks again, once the device has completed `event`."""

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the pool if the block is cut short: half a message may be left."""
        if self.closed:
            raise LoaderError("loader: its workers have ended; begin the epoch again")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def submit(self, number: int, task: Task) -> None:
        with self._closed_on_error():
            self._backlog.append((number, task, self._slot(number)))
            self._distribute()

    def _distribute(self) -> None:
        """Send tasks, few to each worker: with a pipe full in both directions, both ends would wait for ever."""
        while self._backlog:
            worker = min(self.workers, key=lambda worker: len(worker.tasks))
            if len(worker.tasks) >= _TASKS_AHEAD:
                return
            worker.send(self._backlog.popleft())

    def result(self, number: int) -> Chunk:
        """Wait for the result of a task; a worker that died or hangs is noticed meanwhile."""
        while number not in self._ready:
            with self._closed_on_error():
                found = self._take()
            if found is None:
                continue
            done, (chunk, bad, error) = found
            for name, reason in bad:
                self._stats.note_bad(name, reason, self._allowed_bad)
            if error is not None:
                raise error
            if chunk is not None:
                self._ready[done] = chunk
        return self._ready.pop(number)

    def _take(self) -> tuple[int, Done] | None:
        found = self._receive(CHECK_EVERY)
        if found is None:
            self._check()
            return None
        worker, number, done = found
        if worker not in self.workers:
            # It came back after all; another has its task.
            return None
        worker.head_since = time.monotonic()
        worker.tasks.popleft()
        self._distribute()
        return number, done

    def _check(self) -> None:
        for place, worker in enumerate(self.workers):
            trouble = worker.trouble(self._timeout)
            if not trouble:
                continue
            self._lost += 1
            if self._lost > 1:
                raise LoaderError(
                    f"loader: {trouble}, and a worker was replaced before; check the disk and the memory, "
                    "then run again: it resumes from here"
                )
            worker.retire()
            self._stats.note_accident(
                f"loader: {trouble}; another worker takes its place and does its task again"
            )
            self.workers[place] = successor = self._start(worker.status.name)
            for entry in worker.tasks:
                successor.send(entry)

    def drain(self) -> None:
        """Wait for the tasks of an epoch that was left early; what takes long or fails closes the pool."""
        self._backlog.clear()
        until = time.monotonic() + _PATIENCE
        with contextlib.suppress(LoaderError):
            while any(worker.tasks for worker in self.workers) and not self.closed:
                with self._closed_on_error():
                    self._take()
                if time.monotonic() > until:
                    self.close()
        self._ready.clear()
        self._lost = 0


def lower_priority() -> None:
    """Ask the scheduler not to preempt another thread for this one.

    A worker that wakes up would push the training loop off its core, and the loop would have to wait for a core
    each time it has waited for the GIL. Shares of CPU time stay equal: nothing starves.
    """
    if hasattr(os, "SCHED_BATCH"):
        # A container may forbid it, and then only the speed suffers.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Thread(Worker):
    """A thread and its queue; one that hangs cannot be killed, and stays behind as a daemon."""

    def __init__(self, name: str, run: TaskRunner, allocate: Allocate, results: queue.SimpleQueue) -> None:
        super().__init__(name)
        self._run, self._allocate, self._results = run, allocate, results
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._ready, self._retired = threading.Event(), False
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        threads_before = torch.get_num_threads()
        self.thread.start()
        self._ready.wait()
        # A worker asks torch for one thread, its own. The setting is kept per thread, but the value
        # that later threads start from is shared: put that back.
        torch.set_num_threads(threads_before)

    def _serve(self) -> None:
        torch.set_num_threads(1)
        lower_priority()
        self._ready.set()
        while (entry := self._queue.get()) is not None and not self._retired:
            number, task, _ = entry
            self._results.put((self, number, self._run(task, self.status, self._allocate)))

    def send(self, entry: Entry) -> None:
        super().send(entry)
        self._queue.put(entry)

    def died(self) -> bool:
        return not self.thread.is_alive() and not self.result_waits()

    def result_waits(self) -> bool:
        return not self._results.empty()

    def retire(self) -> None:
        self._retired = True
        self._queue.put(None)


class Threads(Pool[_Thread]):
    """The threads of a loader; they live for one epoch. For `pin` their memory is pinned for a GPU."""

    def __init__(
        self, run: TaskRunner, count: int, timeout: float, stats: LoaderStats, allowed_bad: int, pin: bool
    ) -> None:
        super().__init__(timeout, stats, allowed_bad)
        self._run, self._allocate = run, own_memory(pin)
        self._results: queue.SimpleQueue[tuple[_Thread, int, Done]] = queue.SimpleQueue()
        self._closed = False
        self.workers += [self._start(f"data-worker-{number}") for number in range(count)]

    def _start(self, name: str) -> _Thread:
        return _Thread(name, self._run, self._allocate, self._results)

    def _receive(self, seconds: float) -> tuple[_Thread, int, Done] | None:
        with contextlib.suppress(queue.Empty):
            return self._results.get(timeout=seconds)
        return None

    @property
    def closed(self) -> bool:
        return self._closed

    def finish(self) -> None:
        """End the threads: the epoch is over, or was left."""
        self.close()
        deadline = time.monotonic() + 1.0
        for worker in self.workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Let the threads end after their task."""
        self._closed = True
        for worker in self.workers:
            worker.retire()


def own_memory(pin: bool) -> Allocate:
    return lambda shape: torch.empty(tuple(shape), dtype=torch.uint8, pin_memory=pin)
