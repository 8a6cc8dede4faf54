"""A pool of forked processes for numbered tasks, whose results lie in shared memory."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Pipe, wait
from typing import Any

import torch

from fathoms.data.crop.pixel_buffer import Allocate
from fathoms.data.errors import LoaderError
from fathoms.data.workers.process_handle import ProcessHandle, ProcessStatus
from fathoms.data.workers.shared_memory import Arena
from fathoms.data.workers.watch import CHECK_EVERY, Watch
from fathoms.data.workers.worker_process import IGNORED, serve
from fathoms.errors import FathomsError

# Tasks that a process holds at most, and seconds to wait for the tasks of an epoch that was left.
_TASKS_AHEAD, _PATIENCE = 4, 2.0


class ProcessPool:
    """Run `work(task, status, allocate)` in processes; `take()` returns (number, result, slot) as tasks finish.

    What `allocate` gives lies in a slot of shared memory, which is used again after `reuse`. A process that dies or
    hangs is replaced once; see `fathoms.data.workers.watch`.

    Args:
        work: called in a worker; it reports each file with `status.begin`, and its result is pickled.
        count: number of processes.
        timeout: seconds that one file may take.
        report: called with one sentence about a process that was replaced.
        arena: the shared memory; closed with the pool.
        slots: number of slots of the arena.
    """

    def __init__(
        self,
        work: Callable[[Any, ProcessStatus, Allocate], Any],
        count: int,
        timeout: float,
        report: Callable[[str], None],
        arena: Arena,
        slots: int,
    ) -> None:
        self._work, self._watch = work, Watch(timeout, report)
        self.arena, self._free = arena, deque(range(slots))
        self._in_use: deque[tuple[torch.cuda.Event | None, list[int]]] = deque()
        self._slots: dict[int, int] = {}
        self._backlog: deque[tuple[int, Any, int]] = deque()
        self.handles: list[ProcessHandle] = []
        # Before the first fork: if one fails, the processes before it must end.
        self._end = weakref.finalize(self, _end, self.handles, arena)
        for number in range(count):
            self.handles.append(self._fork(f"data-worker-{number}"))

    def _fork(self, name: str) -> ProcessHandle:
        status, (ours, theirs) = ProcessStatus(name), Pipe()
        parent = os.getpid()
        # An interrupt of the child before it ignores them would run its parent's code.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            pid = os.fork()
            if pid == 0:
                # So that it sees the other end close, even where its parent was interrupted before it kept the pid.
                ours.close()
                serve(self._work, status, theirs, self.arena, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return ProcessHandle(status, pid, ours)

    def submit(self, number: int, task: Any) -> None:
        """Queue a task; waits for a slot if none is free."""
        with self._closed_on_error():
            while not self._free:
                event, slots = self._in_use.popleft()
                if event is not None:
                    event.synchronize()
                self._free.extend(slots)
            self._slots[number] = self._free.popleft()
            self._backlog.append((number, task, self._slots[number]))
            self._distribute()

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the pool if the block is cut short: half a message may be left in a pipe."""
        if self.closed:
            raise LoaderError("loader: its processes have ended; begin the epoch again")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _distribute(self) -> None:
        """Send tasks, few to each process: with a pipe full in both directions, both ends would wait for ever."""
        while self._backlog:
            handle = min(self.handles, key=lambda handle: len(handle.tasks))
            if len(handle.tasks) >= _TASKS_AHEAD:
                return
            self._send(handle, self._backlog.popleft())

    def _send(self, handle: ProcessHandle, entry: tuple[int, Any, int]) -> None:
        handle.add(entry)
        # The watch notices a dead process, and gives its tasks to another.
        with contextlib.suppress(ConnectionError):
            handle.pipe.send(entry)

    def take(self) -> tuple[int, Any, int]:
        """Wait for the next finished task; a process that died or hangs is noticed within its time."""
        with self._closed_on_error():
            number, result, error, slot = self._receive()
        if error is not None:
            raise error
        return number, result, slot

    def _receive(self, until: float = math.inf) -> tuple[int, Any, FathomsError | None, int]:
        while time.monotonic() < until:
            for pipe in wait([handle.pipe for handle in self.handles], CHECK_EVERY):
                handle = next(handle for handle in self.handles if handle.pipe is pipe)
                try:
                    number, result, error = handle.pipe.recv()
                # It ended, perhaps in the middle of a message.
                except (EOFError, OSError):
                    break
                slot = handle.done()
                self._distribute()
                return number, result, error, slot
            self._watch.check(self.handles, self._replace)
        raise TimeoutError

    def _replace(self, handle: ProcessHandle) -> ProcessHandle:
        successor = self._fork(handle.status.name)
        for entry in handle.tasks:
            self._send(successor, entry)
        return successor

    def reuse(self, numbers: Iterable[int], event: torch.cuda.Event | None) -> None:
        """Give back the slots of some tasks, once the device has completed `event`."""
        self._in_use.append((event, [self._slots.pop(number) for number in numbers]))

    def finish(self) -> None:
        """Wait for the tasks of an epoch that was left early; what takes long or fails closes the pool."""
        self._backlog.clear()
        until = time.monotonic() + _PATIENCE
        with contextlib.suppress(LoaderError, TimeoutError), self._closed_on_error():
            while any(handle.tasks for handle in self.handles):
                self._receive(until)
        self.reuse(list(self._slots), None)
        self._watch.reset()

    @property
    def closed(self) -> bool:
        """Whether the processes have ended."""
        return not self._end.alive

    def close(self) -> None:
        """End the processes and free the memory."""
        self._end()


def _end(handles: list[ProcessHandle], arena: Arena) -> None:
    for handle in handles:
        handle.retire()
    arena.close()
