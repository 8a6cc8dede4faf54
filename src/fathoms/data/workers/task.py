"""A decoding task: a few samples of a batch, and how a worker turns them into pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fathoms.data.augment.pipeline import Augment
from fathoms.data.crop.image_transform import ImageTransform
from fathoms.data.crop.pixel_buffer import Allocate
from fathoms.data.crop.transforms import Chunk, EvalTransform, TrainTransform
from fathoms.data.decode.decode import Decoder
from fathoms.data.decode.sample_reader import SampleReader
from fathoms.data.sampler import Refs
from fathoms.data.sources.base import Source


@dataclass(frozen=True)
class Task:
    """Samples that are decoded together, and their transform."""

    refs: Refs
    epoch: int
    transform: TrainTransform | EvalTransform | ImageTransform


@dataclass(frozen=True)
class TaskRunner:
    """Run tasks in a worker; `augment` is None where the device augments."""

    source: Source
    decoder: Decoder
    augment: Augment | None

    def __call__(
        self,
        task: Task,
        begin: Callable[[str], None],
        bad: Callable[[str, str], None],
        allocate: Allocate,
    ) -> Chunk:
        """Decode a task into memory from `allocate`.

        Args:
            task: the samples.
            begin: called with the name of each file before it is read.
            bad: called with the name of a bad image and the reason.
            allocate: gives the memory for the pixels.
        """
        reader = SampleReader(self.source, self.decoder, begin, bad)
        chunk = task.transform(reader, task.refs, task.epoch, allocate)
        if self.augment is not None and chunk.images is not None:
            chunk.images.copy_(self.augment.colours(chunk.images, task.refs, task.epoch))
        return chunk
