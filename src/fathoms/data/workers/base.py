"""Who decodes for a loader: threads of its process, or processes of their own; both do the same tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from fathoms.data.augment.pipeline import Augment
from fathoms.data.crop.transforms import Chunk, EvalView, TrainView
from fathoms.data.decode.decode import Decoder
from fathoms.data.decode.sample_reader import Reader
from fathoms.data.sampler import Refs
from fathoms.data.sources.base import Source
from fathoms.data.stats import LoaderStats
from fathoms.data.workers.process_handle import Reporter
from fathoms.data.workers.processes import ProcessPool
from fathoms.data.workers.shared_memory import Arena, Make, make_room
from fathoms.data.workers.threads import Worker, WorkerPool


@dataclass(frozen=True)
class Task:
    """Samples of a batch that are decoded together, and how they are looked at."""

    refs: Refs
    epoch: int
    view: TrainView | EvalView


@dataclass(frozen=True)
class Decoding:
    """What a worker needs to know; `colours` is None where a device does them."""

    source: Source
    decoder: Decoder
    colours: Augment | None

    def __call__(
        self, task: Task, begin: Callable[[str], None], bad: Callable[[str, str], None], make: Make
    ) -> Chunk:
        """Decode a task into room that `make` gives."""
        reader = Reader(self.source, self.decoder, begin, bad)
        chunk = task.view.prepare(reader, task.refs, task.epoch, make)
        if self.colours is not None and chunk.images is not None:
            chunk.images.copy_(self.colours.colours(chunk.images, task.refs, task.epoch))
        return chunk


@runtime_checkable
class Crew(Protocol):
    """Workers as a loader sees them."""

    def submit(self, number: int, task: Task) -> None:
        """Hand in a task."""

    def take(self) -> tuple[int, Chunk]:
        """Wait for the next finished task."""

    def reuse(self, numbers: Iterable[int], event: torch.cuda.Event | None) -> None:
        """What some tasks gave was copied away, or will be when the device comes to `event`."""

    def finish(self) -> None:
        """An epoch is over, or was left."""


class Threads:
    """Threads that live for an epoch."""

    def __init__(
        self, decoding: Decoding, count: int, timeout: float, stats: LoaderStats, allowed: int, pin: bool
    ) -> None:
        make = make_room(pin)

        def work(task: Task, worker: Worker) -> Chunk:
            return decoding(
                task, worker.begin, lambda name, reason: stats.note_bad(name, reason, allowed), make
            )

        self._pool = WorkerPool(work, count, timeout, stats.note_accident)

    def submit(self, number: int, task: Task) -> None:
        """Hand in a task."""
        self._pool.submit(number, task)

    def take(self) -> tuple[int, Chunk]:
        """Wait for the next finished task."""
        return self._pool.take()

    def reuse(self, numbers: Iterable[int], event: torch.cuda.Event | None) -> None:
        """Nothing: every task has memory of its own."""

    def finish(self) -> None:
        """Let the threads end."""
        self._pool.close()


class Processes:
    """Processes that live as long as their loader, and the memory that they share with it.

    Args:
        slots: tasks whose results may be there at once.
        room: bytes that the result of one takes at most.
    """

    def __init__(
        self,
        decoding: Decoding,
        count: int,
        timeout: float,
        stats: LoaderStats,
        allowed: int,
        pin: bool,
        slots: int,
        room: int,
    ) -> None:
        def work(
            task: Task, worker: Reporter, make: Make
        ) -> tuple[Chunk, dict[str, Any], list[tuple[str, str]]]:
            bad: list[tuple[str, str]] = []
            chunk = decoding(task, worker.begin, lambda name, reason: bad.append((name, reason)), make)
            shapes = {
                name: tuple(pixels.shape)
                for name, pixels in (("images", chunk.images), ("pixels", chunk.pixels))
                if pixels is not None
            }
            return dataclasses.replace(chunk, images=None, pixels=None), shapes, bad

        self._stats, self._allowed = stats, allowed
        self.busy = False
        """Whether an epoch has them; it gives them back with `finish`."""
        self._pool = ProcessPool(work, count, timeout, stats.note_accident, Arena(slots, room, pin), slots)

    def submit(self, number: int, task: Task) -> None:
        """Hand in a task."""
        self._pool.submit(number, task)

    def take(self) -> tuple[int, Chunk]:
        """Wait for the next finished task; its pixels are where the process put them."""
        number, (chunk, shapes, bad), slot = self._pool.take()
        for name, reason in bad:
            self._stats.note_bad(name, reason, self._allowed)
        make = self._pool.arena.make(slot)
        return number, dataclasses.replace(chunk, **{name: make(shape) for name, shape in shapes.items()})

    def reuse(self, numbers: Iterable[int], event: torch.cuda.Event | None) -> None:
        """Use the memory of some tasks again."""
        self._pool.reuse(numbers, event)

    def finish(self) -> None:
        """Take what is under way; the processes stay for the next epoch."""
        self._pool.finish()
        self.busy = False

    @property
    def closed(self) -> bool:
        """Whether the processes have ended, by `close` or since they failed."""
        return self._pool.closed

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
