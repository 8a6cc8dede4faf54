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

from fathoms.config_checks import check_ranges, ranged
from fathoms.data.augment.pipeline import Augment, choose_backend
from fathoms.data.images.crops import most_bytes
from fathoms.data.images.decode import DECODERS, choose_decoder
from fathoms.data.images.pixels import as_words, join_layouts
from fathoms.data.images.transforms import Chunk, EvalTransform, ImageTransform, TrainTransform
from fathoms.data.processes import Processes
from fathoms.data.sampler import Batch, LoaderStats, Refs, Sampler
from fathoms.data.sources.source import Source
from fathoms.data.workers import Task, TaskRunner, Threads
from fathoms.errors import ConfigError
from fathoms.machine import usable_cores
from fathoms.registry import check_name

# Samples of one task, at most: the time a task holds the GIL is shared by this many.
CHUNK = 32
WORKER_KINDS = ("auto", "threads", "processes")
CAN_FORK = sys.platform == "linux"


@dataclass(frozen=True)
class LoaderOptions:
    """Speed and limits of a loader, and how it reads images."""

    workers: int = ranged(0, least=0)
    """Number of decoding workers; 0 means one per CPU core."""
    worker_kind: str = "auto"
    """threads, processes, or auto: processes where they feed a GPU with training crops, else threads."""
    prefetch: int = 3
    """Batches prepared ahead."""
    timeout: float = 60.0
    """Seconds one file may take before its worker counts as hung and is replaced, once."""
    max_bad: float = ranged(0.01, least=0, most=1)
    """Share of the data set that may be bad before the run stops."""
    decoder: str = "auto"
    """auto, turbojpeg (crop decode), simplejpeg or pillow."""
    exif: str = "apply"
    """apply rotates images upright; ignore leaves them as stored."""
    grey: bool = False
    """Whether colours become the mean of R, G and B, for models of one channel."""

    def __post_init__(self) -> None:
        check_ranges(self, "--")
        check_name(self.decoder, DECODERS, "decoder", "decoder")
        check_name(self.worker_kind, WORKER_KINDS, "kind of worker", "--worker-kind")
        if self.worker_kind == "processes" and not CAN_FORK:
            raise ConfigError("--worker-kind processes: needs Linux; use threads")
        # These two have no flag.
        if self.prefetch < 1 or self.timeout <= 0:
            raise ConfigError(f"prefetch={self.prefetch}, timeout={self.timeout}: must be positive")

    @property
    def count(self) -> int:
        return self.workers or usable_cores()


class Sender:
    """Copy the parts of a batch to a device and join them; a GPU copies during training, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.sent: torch.cuda.Event | None = None
        """An event that completes once the device has read everything sent so far; None on a CPU."""

    def queued(self) -> torch.cuda.Event | None:
        """An event that completes once all work queued so far is done; None on a CPU, where work is synchronous."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def send(self, parts: list[Tensor]) -> Tensor:
        """The parts as one tensor on the device; on a CPU a copy, too."""
        if self._stream is None:
            return torch.cat(parts)
        with torch.cuda.stream(self._stream):
            there = [part.to(self.device, non_blocking=True) for part in parts]
            self.sent = torch.cuda.Event()
            self.sent.record()
            joined = torch.cat(there)
        using = torch.cuda.current_stream(self.device)
        using.wait_stream(self._stream)
        # Its memory belongs to the copying stream, which must not use it again too soon.
        joined.record_stream(using)
        return joined


class Loader:
    """Batches of one split: `for batch in loader.epoch(3, start=17)`.

    Args:
        source: the images.
        sampler: their order; also says which rank this is.
        transform: training crops, evaluation crops, or `ImageTransform` around a transform of your own, such as
            torchvision's.
        augment: what follows on the device; None yields uint8 images.
        options: workers, limits and decoder.
        device: where batches go.
    """

    def __init__(
        self,
        source: Source,
        sampler: Sampler,
        transform: TrainTransform | EvalTransform | ImageTransform,
        augment: Augment | None = None,
        options: LoaderOptions | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        sampler.check_size(len(source))
        own = isinstance(transform, ImageTransform)
        if own and augment is not None:
            raise ConfigError("augment: a transform of your own gives the model's input; leave augment out")
        if own and (not CAN_FORK or (options is not None and options.worker_kind == "threads")):
            raise ConfigError(
                "worker_kind: a transform of your own needs processes, on Linux; leave threads out"
            )
        self.source, self.sampler, self.transform, self.augment = source, sampler, transform, augment
        self.options = options or LoaderOptions()
        self.device = torch.device(device)
        self.decoder = choose_decoder(self.options.decoder, self.options.exif, grey=self.options.grey)
        self.stats, self._sender = LoaderStats(), Sender(self.device)
        self._allowed_bad = int(self.options.max_bad * len(source))
        self._backend = augment.backend if augment else choose_backend("auto", self.device)
        self._processes: tuple[tuple[int, int], Processes] | None = None
        # Workers do everything that concerns one sample, unless a GPU has kernels for it.
        self._augment_in_worker = augment is not None and self._backend.name != "triton"

    @property
    def grey(self) -> bool:
        return self.options.grey

    @property
    def batches(self) -> int:
        return self.sampler.batches

    def set_size(self, size: int) -> None:
        """Yield images of another size from the next epoch on."""
        self.transform = dataclasses.replace(self.transform, size=size)

    def describe(self) -> str:
        where = getattr(self.transform, "resize_on", "worker")
        return (
            f"data: {self.source.kind} {self.source.split}, {len(self.source)} images, "
            f"{len(self.source.classes)} classes; decoder in use: {self.decoder.name}; "
            f"{self.options.count} {self.worker_kind}; resize on the {where}{self._backend.described(self.device)}"
        )

    def advice(self) -> str:
        """Advice for a consumer that waits for data; empty if it does not wait."""
        return self.stats.advice(self.decoder.name, self.source.kind, self.options.count, usable_cores())

    @property
    def worker_kind(self) -> str:
        """The kind of worker in use: "threads" or "processes"."""
        if self.options.worker_kind != "auto":
            return self.options.worker_kind
        if isinstance(self.transform, ImageTransform):
            return "processes"
        feeds_a_loop = self.device.type == "cuda" and isinstance(self.transform, TrainTransform)
        return "processes" if feeds_a_loop and CAN_FORK and self.options.count > 1 else "threads"

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from batch `start` on."""
        self.sampler.check_start(start)
        pending: dict[int, Refs] = {}
        # Tasks are numbered batch * parts + part, so that a result finds its place. Small batches make small
        # tasks, so that there is one for every worker.
        chunk_size = min(CHUNK, -(-self.sampler.batch_size * self.options.prefetch // self.options.count))
        parts = -(-self.sampler.batch_size // chunk_size)
        workers, submitted, transform = self._workers(chunk_size, parts), start, self.transform
        requested = time.perf_counter()
        try:
            for number in range(start, self.batches):
                while submitted < min(self.batches, number + self.options.prefetch):
                    refs = pending[submitted] = self.sampler.batch(epoch, submitted)
                    for part in range(-(-len(refs) // chunk_size)):
                        own = refs.part(part * chunk_size, (part + 1) * chunk_size)
                        workers.submit(submitted * parts + part, Task(own, epoch, transform))
                    submitted += 1
                began, queued = time.perf_counter(), self._sender.queued()
                refs, chunks = pending.pop(number), []
                tasks = range(number * parts, number * parts + -(-len(refs) // chunk_size))
                for task in tasks:
                    chunks.append(workers.result(task))
                    if queued is not None and not queued.query():
                        # The device still has work, so nothing is lost yet.
                        began = time.perf_counter()
                self.stats.waited += time.perf_counter() - began
                batch = self._assemble(chunks, refs, epoch, number, transform.size)
                workers.reuse(tasks, self._sender.sent)
                self.stats.images += len(refs)
                yield batch
                now = time.perf_counter()
                self.stats.elapsed += now - requested
                requested = now
        finally:
            workers.finish()

    def _assemble(self, chunks: list[Chunk], refs: Refs, epoch: int, number: int, size: int) -> Batch:
        ready = [chunk.images for chunk in chunks if chunk.images is not None]
        images = self._sender.send(ready) if ready else self._resize(chunks, size)
        labels = torch.from_numpy(np.concatenate([chunk.labels for chunk in chunks]))
        labels = labels.to(self.device, non_blocking=True)
        ids = torch.from_numpy(refs.index.astype(np.int64))
        if self.augment is None:
            return Batch(images, labels, ids, epoch, number)
        if not (self._augment_in_worker and ready):
            images = self.augment.colours(images, refs, epoch)
        images, targets = self.augment.finish(images, labels, refs, epoch, number, self.sampler.global_batch)
        return Batch(images, labels, ids, epoch, number, targets)

    def _resize(self, chunks: list[Chunk], size: int) -> Tensor:
        """Send the pixel buffers of all chunks to the device as one, and resize the crops in it."""
        layouts = [chunk.layout for chunk in chunks if chunk.layout is not None]
        pixels = [chunk.pixels for chunk in chunks if chunk.pixels is not None]
        layout = join_layouts(layouts, [len(part) for part in pixels])
        return self._backend.resize(as_words(self._sender.send(pixels)), layout, size)

    def _workers(self, chunk_size: int, parts: int) -> Threads | Processes:
        """New threads; or the processes of the last epoch, unless images have become larger since."""
        options, stats, pin = self.options, self.stats, self.device.type == "cuda"
        run = TaskRunner(self.source, self.decoder, self.augment if self._augment_in_worker else None)
        usual = (run, options.count, options.timeout, stats, self._allowed_bad, pin)
        if self.worker_kind == "threads":
            return Threads(*usual)
        # The batches prepared ahead, the one that is assembled, and one whose pixels are still being sent.
        slots, slot_bytes = (options.prefetch + 2) * parts, chunk_size * most_bytes(self.transform.size)
        if self._processes is not None and self._processes[1].busy:
            # An epoch that is still open keeps its processes: results of two must not meet in one pool.
            self._processes = None
        kept = self._processes
        if kept is None or kept[0] != (slots, slot_bytes) or kept[1].closed:
            self.close()
            kept = self._processes = ((slots, slot_bytes), Processes(*usual, slots, slot_bytes))
        kept[1].busy = True
        return kept[1]

    def close(self) -> None:
        """End the worker processes, if there are any; they also end with the loader."""
        if self._processes is not None:
            self._processes[1].close()
            self._processes = None
