"""The loader of a data set that lives on the device: no threads, no copies, the same interface.

Cropping, mirroring and resizing read straight from the resident pixels, kept as 32-bit words; a batch is
a list of indices.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import numpy as np
import torch

from fathoms.data.ahead import Ahead
from fathoms.data.augment.finish import Finish
from fathoms.data.augment.pipeline import Augment
from fathoms.data.batch import Batch
from fathoms.data.counter_rng import sample_keys
from fathoms.data.crop.packed_rgb import as_planes, as_words
from fathoms.data.crop.pixel_layout import Places
from fathoms.data.crop.random_crop import CropOptions, draw_boxes
from fathoms.data.device.backend import loader_backend
from fathoms.data.errors import DataError
from fathoms.data.sampler import Plan, Refs
from fathoms.data.sources.arrays import ArraySource
from fathoms.data.stats import LoaderStats
from fathoms.data.to_device import to_device
from fathoms.errors import ConfigError

# Pixels that a GPU is given in one go: 16,384 pictures of 32 x 32, 201 MB as float32. What the host does
# for them is the same for one picture as for all. See `results/loader.md` for the memory this takes.
_PIXELS_AT_ONCE = 16384 * 32 * 32


class ResidentLoader:
    """Batches of an `ArraySource` kept on `device`.

    Args:
        source: pixels and labels.
        plan: their order.
        size: side of the images handed out; pixels of another size are resized.
        crop: how training crops are drawn; None takes the whole picture, for evaluation.
        augment: what follows; None yields uint8 images.
        device: where everything lives.
        interpolation: filter of the whole picture where it has another size; crops have their own.
    """

    def __init__(
        self,
        source: ArraySource,
        plan: Plan,
        size: int,
        crop: CropOptions | None = None,
        augment: Augment | None = None,
        device: torch.device | str = "cpu",
        interpolation: str = "bicubic",
    ) -> None:
        if plan.size != len(source):
            raise ConfigError(f"data: the plan is for {plan.size} samples, the source has {len(source)}")
        self.source, self.plan, self.size, self.crop, self.augment = source, plan, size, crop, augment
        self.device = torch.device(device)
        self._cubic = interpolation == "bicubic"
        self._backend = loader_backend(augment, self.device)
        self._next: Ahead[list[Batch]] | None = None
        self._check_room()
        # torch takes no read-only arrays, which is what a file read into memory gives.
        pixels = np.require(source.images, requirements=["C", "W"])
        self._pixels = as_words(torch.from_numpy(pixels).to(self.device)).view(-1)
        self._labels = torch.from_numpy(source.labels).to(self.device)
        self.stats = LoaderStats()

    def _check_room(self) -> None:
        if self.device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self.device)
        # A pixel is kept as a word of four bytes.
        needed = self.source.images.nbytes // 3 * 4
        if needed > free // 2:
            raise DataError(
                f"data: {needed >> 20} MiB of pixels take more than half of the free "
                f"{free >> 20} MiB on {self.device}; write them to a folder or shards"
            )

    @property
    def _at_once(self) -> int:
        """Steps prepared together: a GPU is quicker at a small picture than the host at asking for it."""
        if self.device.type != "cuda":
            return 1
        return max(1, _PIXELS_AT_ONCE // (self.plan.batch_size * self.size**2))

    @property
    def _ahead(self) -> bool:
        """Whether a chunk is prepared piece by piece between the steps of the one before it.

        The host would wait for a GPU there; a CPU does one thing at a time, whatever the order.
        """
        return self.device.type == "cuda"

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return self.plan.steps

    def set_size(self, size: int) -> None:
        """Hand out images of another size from now on."""
        self.size = size

    def describe(self) -> str:
        """One line on what is in use, for the log."""
        return (
            f"data: {self.source.kind} {self.source.split}, {len(self.source)} images, "
            f"{len(self.source.classes)} classes; kept on {self.device}, no decoder in use"
            f"{self._backend.described(self.device)}"
        )

    def advice(self) -> str:
        """Nothing: there is no loader to wait for."""
        return ""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on."""
        if not 0 <= start <= self.steps:
            raise DataError(
                f"data: step {start} is outside the epoch of {self.steps} steps; check the checkpoint"
            )
        asked, chunks = time.perf_counter(), self._chunks(start)
        wanted = [*((epoch, steps) for steps in chunks), *self._after(epoch)]
        for number, steps in enumerate(chunks, start=1):
            began = time.perf_counter()
            batches = self._begun(epoch, steps).finish()
            self._next = self._begun(*wanted[number]) if self._ahead and number < len(wanted) else None
            # The host's time to issue the work; the device runs it between two training steps.
            self.stats.waited += time.perf_counter() - began
            for batch in batches:
                self.stats.images += len(batch)
                yield batch
                if self._next is not None:
                    self._next.go_on()
                now = time.perf_counter()
                self.stats.elapsed += now - asked
                asked = now

    def batch(self, epoch: int, step: int) -> Batch:
        """One batch; any may be asked for, in any order."""
        return self._prepare(epoch, range(step, step + 1))[0]

    def _chunks(self, start: int) -> list[range]:
        """The steps of an epoch that are prepared together, from `start` on."""
        left = self.steps - start
        # Chunks of one size: a last one of few steps would cost the host as much as a full one.
        at_once = max(1, -(-left // max(1, -(-left // self._at_once))))
        return [range(first, min(first + at_once, self.steps)) for first in range(start, self.steps, at_once)]

    def _after(self, epoch: int) -> list[tuple[int, range]]:
        """What will be wanted when an epoch is over: the beginning of the next, unless there is but one."""
        return [(epoch + 1, self._chunks(0)[0])] if self.plan.order == "shuffled" else []

    def _begun(self, epoch: int, steps: range) -> Ahead[list[Batch]]:
        """A chunk that was begun during the one before it, or is begun now."""
        key = (epoch, steps, self.size)
        if self._next is not None and self._next.key == key:
            return self._next
        return Ahead(key, self._pieces(epoch, steps))

    def _prepare(self, epoch: int, steps: range) -> list[Batch]:
        return Ahead((), self._pieces(epoch, steps)).finish()

    def _pieces(self, epoch: int, steps: range) -> Generator[None, None, list[Batch]]:
        """Some consecutive batches, made together: what one sample gets does not depend on its neighbours."""
        parts = [self.plan.batch(epoch, step) for step in steps]
        refs = Refs.joined(parts)
        images = self._crops(refs, epoch)
        (index,) = to_device([refs.index], self.device)
        labels, targets = self._labels.index_select(0, index), None
        yield
        if self.augment is not None:
            layers = self.augment.draw_layers(refs, epoch)
            for layer in layers:
                yield
                images = self.augment.apply_layer(images, layer)
            yield
            erasing = self.augment.draw_erasing(refs, epoch, self.size, self.size)
            asked = dict(zip(steps, parts, strict=True))
            mixture = self.augment.draw_mixture(asked, epoch, self.size, self.size, self.plan.global_batch)
            yield
            images, targets = self.augment.apply_finish(images, labels, Finish(erasing, mixture))
        sizes = [len(part) for part in parts]
        ids = torch.from_numpy(refs.index.astype(np.int64))
        softened = [None] * len(parts) if targets is None else targets.split(sizes)
        pieces = zip(images.split(sizes), labels.split(sizes), ids.split(sizes), steps, softened, strict=True)
        return [Batch(own, named, ids, epoch, step, soft) for own, named, ids, step, soft in pieces]

    def _crops(self, refs: Refs, epoch: int) -> torch.Tensor:
        height, width = self.source.images.shape[1:3]
        count = len(refs)
        if self.crop is None and (height, width) == (self.size, self.size):
            (index,) = to_device([refs.index], self.device)
            return as_planes(self._pixels.view(-1, height, width).index_select(0, index))
        sizes = np.tile(np.array([[height, width]]), (count, 1))
        if self.crop is None:
            boxes = np.tile(np.array([[0, 0, height, width]]), (count, 1))
            flips, cubic = np.zeros(count, bool), np.full(count, self._cubic)
        else:
            keys = sample_keys(self.plan.seed, epoch, "crop", refs.index, refs.repeat)
            boxes, flips, cubic = draw_boxes(sizes, keys, self.crop)
        offset = refs.index.astype(np.int64) * (height * width)
        places = Places(offset, np.full(count, width), sizes, boxes, flips, cubic)
        return self._backend.resize(self._pixels, places, self.size)
