"""Worker processes: what `WorkerPool` does with threads, for a loop that launches work on a GPU.

A loop takes Python's lock for every launch, and threads that decode take it from the loop: on 16 cores a batch that is
put together in 6 ms took 50. Processes have locks of their own. They are forked, so that a data set of millions of
names is there at once, and they decode into shared memory, so that no pixel is copied between processes.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch

from fathoms.data.errors import LoaderError
from fathoms.data.workers.process_handle import Child, Reporter
from fathoms.data.workers.shared_memory import Arena, Make
from fathoms.data.workers.threads import LOOK_EVERY, at_a_file, give_way, lost_again, replacing
from fathoms.errors import FathomsError

# Signals that a scheduler sends to all processes of a job: the loop decides what they mean.
_NOT_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Tasks that a process holds at most, and seconds that an epoch which was left is waited for.
_TASKS_AHEAD, _PATIENCE = 4, 2.0


class ProcessPool:
    """Run `work(task, worker, make)` in processes; `take()` gives (number, result, its slot) as they finish.

    What `make` gives lies in a slot of shared memory, which is used again after `reuse`. A process that dies or hangs
    is replaced once, and its tasks are done again; the second such accident ends the run with an error.

    Args:
        work: called in a worker; it reports each file with `worker.begin`, and its result is sent back.
        count: number of processes.
        timeout: seconds that one file may take.
        replaced: told in a sentence about a process that had to be replaced.
        arena: the shared memory; closed with the pool.
        slots: how many the arena has.
    """

    def __init__(
        self,
        work: Callable[[Any, Reporter, Make], Any],
        count: int,
        timeout: float,
        replaced: Callable[[str], None],
        arena: Arena,
        slots: int,
    ) -> None:
        self._work, self._timeout, self._tell = work, timeout, replaced
        self.arena, self._free = arena, deque(range(slots))
        self._busy: deque[tuple[torch.cuda.Event | None, list[int]]] = deque()
        self._slots: dict[int, int] = {}
        self._backlog: deque[tuple[int, Any, int]] = deque()
        self._accidents = 0
        self.children: list[Child] = []
        # Before the first is begun: if there cannot be as many as are wanted, none may be left.
        self._end = weakref.finalize(self, _end, self.children, arena)
        for number in range(count):
            self.children.append(self._fork(f"data-worker-{number}"))

    def _fork(self, name: str) -> Child:
        reporter, (ours, theirs) = Reporter(name), Pipe()
        parent = os.getpid()
        # An interrupt of the child before it can refuse it would send it down its parent's way.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_OURS)
        try:
            pid = os.fork()
            if pid == 0:
                # So that it sees the other end close, even where its parent was interrupted before it knew of it.
                ours.close()
                _serve(self._work, reporter, theirs, self.arena, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return Child(reporter, pid, ours)

    def submit(self, number: int, task: Any) -> None:
        """Hand in a task; waits for a slot if none is free."""
        with self._in_one_piece():
            while not self._free:
                event, slots = self._busy.popleft()
                if event is not None:
                    event.synchronize()
                self._free.extend(slots)
            self._slots[number] = self._free.popleft()
            self._backlog.append((number, task, self._slots[number]))
            self._deal()

    @contextlib.contextmanager
    def _in_one_piece(self) -> Iterator[None]:
        """What is cut short in here may have left half a message in a pipe: it ends the pool."""
        if self.closed:
            raise LoaderError("loader: its processes have ended; begin the epoch again")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _deal(self) -> None:
        """Hand out tasks, few to each: a pipe that is full in both directions would be waited for at both ends."""
        while self._backlog:
            child = min(self.children, key=lambda child: len(child.tasks))
            if len(child.tasks) >= _TASKS_AHEAD:
                return
            self._send(child, self._backlog.popleft())

    def _send(self, child: Child, entry: tuple[int, Any, int]) -> None:
        child.add(entry)
        # One that is dead is found out by the watch, which gives its tasks to another.
        with contextlib.suppress(ConnectionError):
            child.pipe.send(entry)

    def take(self) -> tuple[int, Any, int]:
        """Wait for the next finished task; a process that died or hangs is noticed within its time."""
        with self._in_one_piece():
            number, result, error, slot = self._receive()
        if error is not None:
            raise error
        return number, result, slot

    def _receive(self, until: float = math.inf) -> tuple[int, Any, FathomsError | None, int]:
        while time.monotonic() < until:
            for pipe in wait([child.pipe for child in self.children], LOOK_EVERY):
                child = next(child for child in self.children if child.pipe is pipe)
                try:
                    number, result, error = child.pipe.recv()
                # It ended, perhaps in the middle of a message.
                except (EOFError, OSError):
                    break
                slot = child.done()
                self._deal()
                return number, result, error, slot
            self._watch()
        raise TimeoutError

    def _watch(self) -> None:
        for place, child in enumerate(self.children):
            trouble = child.trouble(self._timeout)
            if not trouble:
                continue
            self._accidents += 1
            if self._accidents > 1:
                raise LoaderError(lost_again(trouble))
            child.kill()
            self._tell(replacing(trouble))
            self.children[place] = self._fork(child.reporter.name)
            for entry in child.tasks:
                self._send(self.children[place], entry)

    def reuse(self, numbers: Iterable[int], event: torch.cuda.Event | None) -> None:
        """Give back the slots of some tasks, as soon as the device has come to `event`."""
        self._busy.append((event, [self._slots.pop(number) for number in numbers]))

    def finish(self) -> None:
        """Wait for what is under way, of an epoch that was left early; what takes long or fails ends the pool."""
        self._backlog.clear()
        until = time.monotonic() + _PATIENCE
        with contextlib.suppress(LoaderError, TimeoutError), self._in_one_piece():
            while any(child.tasks for child in self.children):
                self._receive(until)
        self.reuse(list(self._slots), None)
        self._accidents = 0

    @property
    def closed(self) -> bool:
        """Whether the processes have ended."""
        return not self._end.alive

    def close(self) -> None:
        """End the processes and give the memory back."""
        self._end()


def _end(children: list[Child], arena: Arena) -> None:
    for child in children:
        child.kill()
    arena.close()


def _serve(
    work: Callable[[Any, Reporter, Make], Any],
    worker: Reporter,
    pipe: Connection,
    arena: Arena,
    parent: int,
) -> NoReturn:
    """Do tasks until there is nobody to do them for. Leaves nothing of the parent's to be ended twice."""
    try:
        for number in _NOT_OURS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_OURS)
        # What the parent has on a GPU is not to be freed here.
        gc.freeze()
        # The parent's other threads are not here, and with them those that torch would wait for.
        torch.set_num_threads(1)
        give_way()
        while True:
            while not pipe.poll(1.0):
                if os.getppid() != parent:
                    os._exit(0)
            number, task, slot = pipe.recv()
            worker.begin("")
            try:
                message = (number, work(task, worker, arena.make(slot)), None)
            except FathomsError as failure:
                message = (number, None, _sendable(failure))
            except Exception as failure:
                message = (number, None, at_a_file(worker.name, worker.item, failure))
            worker.begin("")
            pipe.send(message)
    finally:
        os._exit(0)


def _sendable(error: FathomsError) -> FathomsError:
    """The error, or what it says: one that is not made of its message alone may not arrive."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LoaderError(str(error))
    return error
