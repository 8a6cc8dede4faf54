"""The loader of encoded images: workers decode ahead, batches come out in order, on the device."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fathoms.data.augment.pipeline import Augment
from fathoms.data.batch import Batch
from fathoms.data.crop.decode_crops import most_bytes
from fathoms.data.crop.packed_rgb import as_words
from fathoms.data.crop.pixel_layout import Places
from fathoms.data.crop.transforms import Chunk, EvalView, TrainView
from fathoms.data.decode.decode import BACKENDS, choose_decoder
from fathoms.data.device.backend import loader_backend
from fathoms.data.device.sender import Sender
from fathoms.data.errors import DataError
from fathoms.data.sampler import Plan, Refs
from fathoms.data.sources.base import Source
from fathoms.data.stats import LoaderStats
from fathoms.data.workers.base import Crew, Decoding, Processes, Task, Threads
from fathoms.data.workers.threads import available_cores
from fathoms.errors import ConfigError
from fathoms.registry import check_name

# Samples of one task, at most: what a task costs under Python's lock is shared by this many.
CHUNK = 32
KINDS = ("auto", "threads", "processes")
CAN_FORK = sys.platform == "linux"


@dataclass(frozen=True)
class LoaderOptions:
    """How a loader works; none of this changes what comes out of it."""

    workers: int = 0
    """How many decode; 0 means one per CPU core."""
    kind: str = "auto"
    """threads, processes, or auto: processes where they feed a GPU with training crops, else threads."""
    prefetch: int = 3
    """Batches prepared ahead."""
    timeout: float = 60.0
    """Seconds one file may take before its worker counts as hung and is replaced, once."""
    max_bad: float = 0.01
    """Share of the data set that may be bad before the run stops."""
    decoder: str = "auto"
    """auto, turbojpeg (crop decode), simplejpeg or pillow."""
    exif: str = "apply"
    """apply turns pictures upright; ignore leaves them as stored."""

    def __post_init__(self) -> None:
        check_name(self.decoder, BACKENDS, "decoder", "data.decoder")
        check_name(self.kind, KINDS, "kind of worker", "data.kind")
        if self.kind == "processes" and not CAN_FORK:
            raise ConfigError("data.kind='processes' needs Linux; use 'threads'")
        if self.workers < 0 or self.prefetch < 1 or self.timeout <= 0 or not 0 <= self.max_bad <= 1:
            raise ConfigError(
                f"data: workers={self.workers}, prefetch={self.prefetch}, timeout={self.timeout}, "
                f"max_bad={self.max_bad}: one is out of range"
            )

    @property
    def count(self) -> int:
        """The number of workers, with 0 resolved to the cores this process may use."""
        return self.workers or available_cores()


class Loader:
    """Batches of one split: `for batch in loader.epoch(3, start=17)`.

    Args:
        source: the pictures.
        plan: their order; also says which rank this is.
        view: training crops or evaluation crops.
        augment: what follows on the device; None yields uint8 images.
        options: threads, limits and decoder.
        device: where batches go.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        view: TrainView | EvalView,
        augment: Augment | None = None,
        options: LoaderOptions | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if plan.size != len(source):
            raise ConfigError(f"data: the plan is for {plan.size} samples, the source has {len(source)}")
        self.source, self.plan, self.view, self.augment = source, plan, view, augment
        self.options = options or LoaderOptions()
        self.device = torch.device(device)
        self.decoder = choose_decoder(self.options.decoder, self.options.exif)
        self.stats, self._sender = LoaderStats(), Sender(self.device)
        self._allowed = int(self.options.max_bad * len(source))
        self._backend = loader_backend(augment, self.device)
        self._processes: tuple[tuple[int, int], Processes] | None = None
        # On a CPU the workers do everything that belongs to one sample; a GPU takes it over from them.
        self._colour_in_worker = augment is not None and self.device.type == "cpu"

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return self.plan.steps

    def set_size(self, size: int) -> None:
        """Hand out images of another size from the next epoch on."""
        self.view = dataclasses.replace(self.view, size=size)

    def describe(self) -> str:
        """One line on what is in use, for the log."""
        where = getattr(self.view, "resize_on", "worker")
        return (
            f"data: {self.source.kind} {self.source.split}, {len(self.source)} images, "
            f"{len(self.source.classes)} classes; decoder in use: {self.decoder.name} ({self.decoder.reason}); "
            f"{self.options.count} {self.kind}; resize on the {where}{self._backend.described(self.device)}"
        )

    def advice(self) -> str:
        """What to do if the consumer waits for data; empty if it does not."""
        return self.stats.advice(self.decoder.name, self.source.kind, self.options.count, available_cores())

    @property
    def kind(self) -> str:
        """Who decodes: "threads" or "processes"."""
        if self.options.kind != "auto":
            return self.options.kind
        feeds_a_loop = self.device.type == "cuda" and isinstance(self.view, TrainView)
        return "processes" if feeds_a_loop and CAN_FORK and self.options.count > 1 else "threads"

    def _gather_crew(self, chunk: int, parts: int) -> Crew:
        """New threads; or the processes of the last epoch, unless pictures have become larger since."""
        options, stats, pin = self.options, self.stats, self.device.type == "cuda"
        decoding = Decoding(self.source, self.decoder, self.augment if self._colour_in_worker else None)
        usual = (decoding, options.count, options.timeout, stats, self._allowed, pin)
        if self.kind == "threads":
            return Threads(*usual)
        # Steps that are prepared, the one that is put together, and one whose pixels are still on their way.
        slots, room = (options.prefetch + 2) * parts, chunk * most_bytes(self.view.size)
        if self._processes is not None and self._processes[1].busy:
            # An epoch that is still open keeps its own: results of two must not meet in one pool.
            self._processes = None
        kept = self._processes
        if kept is None or kept[0] != (slots, room) or kept[1].closed:
            self.close()
            kept = self._processes = ((slots, room), Processes(*usual, slots, room))
        kept[1].busy = True
        return kept[1]

    def close(self) -> None:
        """End the processes, if there are any; they also end with the loader."""
        if self._processes is not None:
            self._processes[1].close()
            self._processes = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on."""
        if not 0 <= start <= self.steps:
            raise DataError(
                f"data: step {start} is outside the epoch of {self.steps} steps; check the checkpoint"
            )
        waiting: dict[int, list[Chunk | None]] = {}
        left: dict[int, int] = {}
        plans: dict[int, Refs] = {}
        # Tasks are numbered step * parts + part, so that a result finds its place. Small batches make small
        # tasks, so that there is one for every worker.
        chunk_size = min(CHUNK, -(-self.plan.batch_size * self.options.prefetch // self.options.count))
        parts = -(-self.plan.batch_size // chunk_size)
        crew, submitted, view = self._gather_crew(chunk_size, parts), start, self.view
        asked = time.perf_counter()
        try:
            for step in range(start, self.steps):
                while submitted < min(self.steps, step + self.options.prefetch):
                    refs = self.plan.batch(epoch, submitted)
                    count = -(-len(refs) // chunk_size)
                    plans[submitted], left[submitted] = refs, count
                    waiting[submitted] = [None for _ in range(count)]
                    for part in range(count):
                        own = refs.part(part * chunk_size, (part + 1) * chunk_size)
                        crew.submit(submitted * parts + part, Task(own, epoch, view))
                    submitted += 1
                began, asked_before = time.perf_counter(), self._sender.asked()
                while left[step]:
                    number, chunk = crew.take()
                    waiting[number // parts][number % parts] = chunk
                    left[number // parts] -= 1
                    if asked_before is not None and not asked_before.query():
                        # The device still has work, so nothing is lost yet.
                        began = time.perf_counter()
                self.stats.waited += time.perf_counter() - began
                chunks = [chunk for chunk in waiting.pop(step) if chunk is not None]
                refs = plans.pop(step)
                del left[step]
                batch = self._assemble(chunks, refs, epoch, step, view.size)
                crew.reuse(range(step * parts, step * parts + len(chunks)), self._sender.sent)
                self.stats.images += len(refs)
                yield batch
                now = time.perf_counter()
                self.stats.elapsed += now - asked
                asked = now
        finally:
            crew.finish()

    def _assemble(self, chunks: list[Chunk], refs: Refs, epoch: int, step: int, size: int) -> Batch:
        images = self._images(chunks, size)
        labels = torch.from_numpy(np.concatenate([chunk.labels for chunk in chunks]))
        labels = labels.to(self.device, non_blocking=True)
        ids = torch.from_numpy(refs.index.astype(np.int64))
        if self.augment is None:
            return Batch(images, labels, ids, epoch, step)
        if not self._colour_in_worker or chunks[0].images is None:
            images = self.augment.colours(images, refs, epoch)
        images, targets = self.augment.finish(images, labels, refs, epoch, step, self.plan.global_batch)
        return Batch(images, labels, ids, epoch, step, targets)

    def _images(self, chunks: list[Chunk], size: int) -> Tensor:
        ready = [chunk.images for chunk in chunks if chunk.images is not None]
        if ready:
            return self._sender.send(ready)
        places = [chunk.places for chunk in chunks if chunk.places is not None]
        pixels = [chunk.pixels for chunk in chunks if chunk.pixels is not None]
        lengths = np.array([len(part) for part in pixels])
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        joined = Places(
            np.concatenate([place.offset + start for place, start in zip(places, starts, strict=True)]),
            *(
                np.concatenate([getattr(p, name) for p in places])
                for name in ("pitch", "size", "box", "flip", "cubic")
            ),
        )
        return self._backend.resize(as_words(self._sender.send(pixels)), joined, size)
