"""The loader of a data set that is kept on the device: no workers, no copies, the interface of `Loader`.

Cropping, flipping and resizing read straight from the resident pixels, packed into 32-bit words; a batch is a list of
indices.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from fathoms.data.augment.erase_and_mix import Finish
from fathoms.data.augment.pipeline import Augment, choose_backend
from fathoms.data.counter_rng import sample_keys, to_device
from fathoms.data.images.crops import CropOptions, draw_boxes
from fathoms.data.images.decode import greyscale
from fathoms.data.images.pixels import PixelLayout, as_words, words_to_planes
from fathoms.data.sampler import Batch, LoaderStats, Refs, Sampler
from fathoms.data.sources.arrays import ArraySource
from fathoms.data.sources.source import DataError

# Pixels that a GPU prepares at once: 16,384 images of 32 x 32, 201 MB as float32. The host's work is the same for one
# image as for all of them. See `results/loader.md` for the memory this takes.
_PIXELS_AT_ONCE = 16384 * 32 * 32

# Pixels and labels of each source by device, and whether they are grey, for as long as the source lives.
_Key = tuple[torch.device, bool]
_RESIDENT: WeakKeyDictionary[ArraySource, dict[_Key, tuple[torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()

T = TypeVar("T")


class Ahead(Generic[T]):
    """A generator run piece by piece between training batches: each `next` is a piece, its return value the result."""

    def __init__(self, key: object, pieces: Generator[None, None, T]) -> None:
        self.key = key
        """Identifies the result, so that one begun for something else is not used; None after an error."""
        self._pieces = pieces
        self._result: list[T] = []

    def advance(self) -> bool:
        """Do the next piece; False when nothing is left to do."""
        if self._result:
            return False
        try:
            next(self._pieces)
        except StopIteration as end:
            self._result.append(end.value)
        except BaseException:
            # A generator that raised is over, and would seem to have returned None.
            self.key = None
            raise
        return not self._result

    def finish(self) -> T:
        while self.advance():
            pass
        return self._result[0]


class DeviceLoader:
    """Batches of an `ArraySource` kept on `device`.

    Args:
        source: pixels and labels.
        sampler: their order.
        size: side of the images in a batch; images of another size are resized.
        crop: how training crops are drawn; None takes the whole image, for evaluation.
        augment: what follows; None yields uint8 images.
        device: where pixels and batches are.
        interpolation: filter for a whole image of another size; crops have their own.
        grey: whether colours become the mean of R, G and B, for models of one channel.
    """

    def __init__(
        self,
        source: ArraySource,
        sampler: Sampler,
        size: int,
        crop: CropOptions | None = None,
        augment: Augment | None = None,
        device: torch.device | str = "cpu",
        interpolation: str = "bicubic",
        grey: bool = False,
    ) -> None:
        sampler.check_size(len(source))
        self.source, self.sampler, self.size, self.crop, self.augment = source, sampler, size, crop, augment
        self.device, self.grey = torch.device(device), grey
        self._cubic = interpolation == "bicubic"
        self._backend = augment.backend if augment else choose_backend("auto", self.device)
        self._next: Ahead[list[Batch]] | None = None
        self._pixels, self._labels = self._resident()
        self.stats = LoaderStats()

    def _resident(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels and labels on the device; loaders of one source, of one run or the next, share them."""
        held = _RESIDENT.setdefault(self.source, {})
        key = (self.device, self.grey)
        if key not in held:
            self._check_memory()
            images = greyscale(self.source.images) if self.grey else self.source.images
            # torch does not take read-only arrays, and a file read into memory is one.
            pixels = np.require(images, requirements=["C", "W"])
            words = as_words(torch.from_numpy(pixels).to(self.device)).view(-1)
            held[key] = words, torch.from_numpy(self.source.labels).to(self.device)
        return held[key]

    def _check_memory(self) -> None:
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
    def _ahead(self) -> bool:
        """Whether a group of batches is prepared piece by piece while the one before it is used.

        The host would wait for a GPU there; a CPU does one thing at a time, in any order.
        """
        return self.device.type == "cuda"

    @property
    def _at_once(self) -> int:
        """Batches prepared together: a GPU processes a small image faster than the host can launch the work."""
        at_once = _PIXELS_AT_ONCE // (self.sampler.batch_size * self.size**2)
        return max(1, at_once) if self.device.type == "cuda" else 1

    @property
    def batches(self) -> int:
        return self.sampler.batches

    def set_size(self, size: int) -> None:
        self.size = size

    def describe(self) -> str:
        return (
            f"data: {self.source.kind} {self.source.split}, {len(self.source)} images, "
            f"{len(self.source.classes)} classes; kept on {self.device}, no decoder in use"
            f"{self._backend.described(self.device)}"
        )

    def advice(self) -> str:
        return ""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from batch `start` on."""
        self.sampler.check_start(start)
        requested, groups = time.perf_counter(), self._groups(start)
        wanted = [*((epoch, numbers) for numbers in groups), *self._after(epoch)]
        for place, numbers in enumerate(groups, start=1):
            began = time.perf_counter()
            batches = self._begun(epoch, numbers).finish()
            self._next = self._begun(*wanted[place]) if self._ahead and place < len(wanted) else None
            # The host's time to launch the work; the device runs it between two training batches.
            self.stats.waited += time.perf_counter() - began
            for batch in batches:
                self.stats.images += len(batch)
                yield batch
                if self._next is not None:
                    self._next.advance()
                now = time.perf_counter()
                self.stats.elapsed += now - requested
                requested = now

    def _groups(self, start: int) -> list[range]:
        """The batches of an epoch that are prepared together, from `start` on."""
        left = self.batches - start
        # Groups of one size: a last one of few batches would cost the host as much as a full one.
        at_once = max(1, -(-left // max(1, -(-left // self._at_once))))
        return [
            range(first, min(first + at_once, self.batches)) for first in range(start, self.batches, at_once)
        ]

    def _after(self, epoch: int) -> list[tuple[int, range]]:
        """The first group of the next epoch, which is begun ahead; evaluation has only one epoch."""
        return [(epoch + 1, self._groups(0)[0])] if self.sampler.order == "shuffled" else []

    def _begun(self, epoch: int, numbers: range) -> Ahead[list[Batch]]:
        """A group that was begun during the one before it, or is begun now."""
        key = (epoch, numbers, self.size)
        if self._next is not None and self._next.key == key:
            return self._next
        return Ahead(key, self._pieces(epoch, numbers))

    def _pieces(self, epoch: int, numbers: range) -> Generator[None, None, list[Batch]]:
        """Some consecutive batches, prepared together: a sample does not depend on its neighbours."""
        parts = [self.sampler.batch(epoch, number) for number in numbers]
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
            asked = dict(zip(numbers, parts, strict=True))
            mixture = self.augment.draw_mixture(asked, epoch, self.size, self.size, self.sampler.global_batch)
            yield
            images, targets = self.augment.apply_finish(images, labels, Finish(erasing, mixture))
        sizes = [len(part) for part in parts]
        ids = torch.from_numpy(refs.index.astype(np.int64))
        softened = [None] * len(parts) if targets is None else targets.split(sizes)
        columns = images.split(sizes), labels.split(sizes), ids.split(sizes), numbers, softened
        return [
            Batch(own, named, ids, epoch, number, soft)
            for own, named, ids, number, soft in zip(*columns, strict=True)
        ]

    def _crops(self, refs: Refs, epoch: int) -> torch.Tensor:
        height, width = self.source.images.shape[1:3]
        count = len(refs)
        if self.crop is None and (height, width) == (self.size, self.size):
            (index,) = to_device([refs.index], self.device)
            return words_to_planes(self._pixels.view(-1, height, width).index_select(0, index))
        sizes = np.tile(np.array([[height, width]]), (count, 1))
        if self.crop is None:
            boxes = np.tile(np.array([[0, 0, height, width]]), (count, 1))
            flips, cubic = np.zeros(count, bool), np.full(count, self._cubic)
        else:
            keys = sample_keys(self.sampler.seed, epoch, "crop", refs.index, refs.repeat)
            boxes, flips, cubic = draw_boxes(sizes, keys, self.crop)
        offset = refs.index.astype(np.int64) * (height * width)
        layout = PixelLayout(offset, np.full(count, width), sizes, boxes, flips, cubic)
        return self._backend.resize(self._pixels, layout, self.size)
