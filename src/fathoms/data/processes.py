"""Decoding processes, for a loop that launches work on a GPU.

A training loop takes the GIL for every launch, and threads that decode take it from the loop: fed by 15 threads an
H200 kept 0.41 of its rate, by 8 processes 0.97 (results/loader.md). Processes have a GIL each. They are forked, so
that a data set of millions of names is there at once, and they decode into shared memory that is pinned once. torch's
DataLoader makes no more images per CPU second, and raises in the middle of an update when a worker dies
(results/worker_pools.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import mmap
import os
import pickle
import signal
import weakref
from collections import deque
from collections.abc import Iterable
from math import prod
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch

from fathoms.data.images.pixels import Allocate
from fathoms.data.images.transforms import Chunk
from fathoms.data.sampler import LoaderStats
from fathoms.data.sources.source import LoaderError
from fathoms.data.workers import Done, Entry, Pool, Status, TaskRunner, Worker, lower_priority
from fathoms.errors import FathomsError

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that a scheduler sends to all processes of a job; the training loop handles them."""


class Arena:
    """Slots of `slot_bytes` bytes each, shared with the processes that are forked later; pinned for a GPU.

    The memory is anonymous: no file has to be removed and no limit of /dev/shm applies.
    """

    def __init__(self, slots: int, slot_bytes: int, pin: bool) -> None:
        # Whole pages, because cudaHostRegister takes only these.
        self.slot_bytes = -(-max(1, slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bytes = torch.frombuffer(mmap.mmap(-1, slots * self.slot_bytes), dtype=torch.uint8)
        self._pinned = pin
        if pin:
            _cuda("cudaHostRegister", self._bytes.data_ptr(), self._bytes.numel(), 0)

    def allocator(self, number: int) -> Allocate:
        """Memory at the start of a slot; each call gives the same bytes again."""
        slot = self._bytes[number * self.slot_bytes : (number + 1) * self.slot_bytes]
        return lambda shape: slot[: prod(shape)].view(tuple(shape))

    def close(self) -> None:
        """Unpin the memory; it is freed with the last tensor that refers to it."""
        if self._pinned:
            self._pinned = False
            _cuda("cudaHostUnregister", self._bytes.data_ptr())


def _cuda(name: str, *arguments: int) -> None:
    torch.cuda.check_error(int(getattr(torch.cuda.cudart(), name)(*arguments)))


class _Process(Worker):
    """A forked process and the pipe to it."""

    def __init__(self, name: str, run: TaskRunner, arena: Arena) -> None:
        super().__init__(name)
        self.pipe, theirs = Pipe()
        self.ended = False
        parent = os.getpid()
        # An interrupt of the child before it ignores them would run its parent's code.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                # So that it sees the other end close, even where its parent was interrupted before it kept the pid.
                self.pipe.close()
                _serve(run, self.status, theirs, arena, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def send(self, entry: Entry) -> None:
        super().send(entry)
        # The pool notices a dead process, and gives its tasks to another.
        with contextlib.suppress(ConnectionError):
            self.pipe.send(entry)

    def died(self) -> bool:
        return self._wait(os.WNOHANG)

    def result_waits(self) -> bool:
        return self.pipe.poll()

    def _wait(self, options: int = 0) -> bool:
        # A process that was waited for is gone, and its pid may belong to another.
        if not self.ended:
            try:
                self.ended = os.waitpid(self.pid, options)[0] == self.pid
            except ChildProcessError:
                self.ended = True
        return self.ended

    def retire(self) -> None:
        self.pipe.close()
        if not self._wait(os.WNOHANG):
            os.kill(self.pid, signal.SIGKILL)
            self._wait()


class Processes(Pool[_Process]):
    """The processes of a loader, and memory for `slots` results at once; they live as long as the loader."""

    def __init__(
        self,
        run: TaskRunner,
        count: int,
        timeout: float,
        stats: LoaderStats,
        allowed_bad: int,
        pin: bool,
        slots: int,
        slot_bytes: int,
    ) -> None:
        super().__init__(timeout, stats, allowed_bad)
        self._run, self._arena = run, Arena(slots, slot_bytes, pin)
        self._free = deque(range(slots))
        self._in_use: deque[tuple[torch.cuda.Event | None, list[int]]] = deque()
        self._slots: dict[int, int] = {}
        # Before the first fork: if one fails, the processes before it must end.
        self._end = weakref.finalize(self, _end, self.workers, self._arena)
        for number in range(count):
            self.workers.append(self._start(f"data-worker-{number}"))

    def _start(self, name: str) -> _Process:
        return _Process(name, self._run, self._arena)

    def _slot(self, number: int) -> int:
        """A free slot; waits until the device has read one if there is none."""
        while not self._free:
            event, slots = self._in_use.popleft()
            if event is not None:
                event.synchronize()
            self._free.extend(slots)
        self._slots[number] = self._free.popleft()
        return self._slots[number]

    def reuse(self, numbers: Iterable[int], event: torch.cuda.Event | None) -> None:
        self._in_use.append((event, [self._slots.pop(number) for number in numbers]))

    def _receive(self, seconds: float) -> tuple[_Process, int, Done] | None:
        for pipe in wait([worker.pipe for worker in self.workers], seconds):
            worker = next(worker for worker in self.workers if worker.pipe is pipe)
            try:
                number, shapes, done = worker.pipe.recv()
            # It ended, perhaps in the middle of a message.
            except (EOFError, OSError):
                return None
            return worker, number, done._replace(chunk=self._with_pixels(number, done.chunk, shapes))
        return None

    def _with_pixels(self, number: int, chunk: Chunk | None, shapes: dict[str, Any]) -> Chunk | None:
        if chunk is None:
            return None
        view = self._arena.allocator(self._slots[number])
        pixels: dict[str, Any] = {name: view(shape).view(dtype) for name, (shape, dtype) in shapes.items()}
        return dataclasses.replace(chunk, **pixels)

    def finish(self) -> None:
        """Wait for unfinished tasks: the epoch is over, or was left. The processes stay for the next."""
        self.drain()
        self.reuse(list(self._slots), None)
        self.busy = False

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        self._end()


def _end(workers: list[_Process], arena: Arena) -> None:
    for worker in workers:
        worker.retire()
    arena.close()


def _serve(run: TaskRunner, status: Status, pipe: Connection, arena: Arena, parent: int) -> NoReturn:
    """Run tasks until the parent is gone, then exit without running any of the parent's clean-up."""
    try:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
        # The parent's tensors on a GPU must not be freed here.
        gc.freeze()
        # The parent's other threads do not exist here, among them those that torch would wait for.
        torch.set_num_threads(1)
        lower_priority()
        while True:
            while not pipe.poll(1.0):
                if os.getppid() != parent:
                    os._exit(0)
            number, task, slot = pipe.recv()
            done = run(task, status, arena.allocator(slot))
            # The pixels are in the slot already; only their shape in bytes and their type travel.
            shapes, chunk = {}, done.chunk
            if chunk is not None:
                both = {"images": chunk.images, "pixels": chunk.pixels}
                there = {name: pixels for name, pixels in both.items() if pixels is not None}
                shapes = {name: (tuple(p.view(torch.uint8).shape), p.dtype) for name, p in there.items()}
                chunk = dataclasses.replace(chunk, images=None, pixels=None)
            pipe.send((number, shapes, Done(chunk, done.bad, _picklable(done.error))))
    finally:
        os._exit(0)


def _picklable(error: FathomsError | None) -> FathomsError | None:
    """The error, or its message in another if it cannot be pickled and rebuilt."""
    try:
        pickle.loads(pickle.dumps(error))
    # Pickling runs the error's own code, which may raise anything.
    except Exception:  # noqa: BLE001
        return LoaderError(str(error))
    return error
