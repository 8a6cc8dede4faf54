"""The decoding processes of a loader, for a loop that launches work on a GPU.

A training loop takes the GIL for every launch, and threads that decode take it from the loop: on 16 cores a batch that
is assembled in 6 ms took 50. Processes have a GIL each. They are forked, so that a data set of millions of names is
there at once, and they decode into shared memory, so that no pixel is copied between processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from fathoms.data.crop.pixel_buffer import Allocate
from fathoms.data.crop.transforms import Chunk
from fathoms.data.stats import LoaderStats
from fathoms.data.workers.process_handle import ProcessStatus
from fathoms.data.workers.process_pool import ProcessPool
from fathoms.data.workers.shared_memory import Arena
from fathoms.data.workers.task import Task, TaskRunner


class Processes:
    """The processes of a loader and their shared memory; they live as long as the loader.

    Args:
        run: what a process does with a task.
        count: number of processes.
        timeout: seconds that one file may take.
        stats: where bad images and replaced processes are noted.
        allowed_bad: bad images before the run stops.
        pin: whether the memory is pinned, for a GPU.
        slots: number of results that exist at once.
        slot_bytes: size of the largest result.
    """

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
        def work(
            task: Task, status: ProcessStatus, allocate: Allocate
        ) -> tuple[Chunk, dict[str, Any], list[tuple[str, str]]]:
            bad: list[tuple[str, str]] = []
            chunk = run(task, status.begin, lambda name, reason: bad.append((name, reason)), allocate)
            # The pixels are in the slot already; only their shape in bytes and their type travel.
            shapes = {
                name: (tuple(pixels.view(torch.uint8).shape), pixels.dtype)
                for name, pixels in (("images", chunk.images), ("pixels", chunk.pixels))
                if pixels is not None
            }
            return dataclasses.replace(chunk, images=None, pixels=None), shapes, bad

        self._stats, self._allowed_bad = stats, allowed_bad
        self.busy = False
        """Whether an epoch uses them; it gives them back with `finish`."""
        arena = Arena(slots, slot_bytes, pin)
        self._pool = ProcessPool(work, count, timeout, stats.note_accident, arena, slots)

    def submit(self, number: int, task: Task) -> None:
        """Queue a task."""
        self._pool.submit(number, task)

    def take(self) -> tuple[int, Chunk]:
        """Wait for the next finished task; its pixels are a view of the slot."""
        number, (chunk, shapes, bad), slot = self._pool.take()
        for name, reason in bad:
            self._stats.note_bad(name, reason, self._allowed_bad)
        view = self._pool.arena.allocator(slot)
        return number, dataclasses.replace(
            chunk, **{name: view(shape).view(dtype) for name, (shape, dtype) in shapes.items()}
        )

    def reuse(self, numbers: Iterable[int], event: torch.cuda.Event | None) -> None:
        """Use the memory of some tasks again, once the device has completed `event`."""
        self._pool.reuse(numbers, event)

    def finish(self) -> None:
        """Wait for unfinished tasks: the epoch is over, or was left. The processes stay for the next."""
        self._pool.finish()
        self.busy = False

    @property
    def closed(self) -> bool:
        """Whether the processes have ended, by `close` or by an error."""
        return self._pool.closed

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
