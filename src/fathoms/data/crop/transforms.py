"""Training and evaluation transforms: from a list of samples to pixels, inside a worker.

A bad image is noted by name and, in training, replaced by another that its own key selects: the same one on every
machine, with any number of workers, and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fathoms.data.crop.decode_crops import decode_crops
from fathoms.data.crop.pixel_buffer import Allocate, PixelLayout
from fathoms.data.crop.random_crop import CropOptions
from fathoms.data.crop.resize import evaluation_pixels
from fathoms.data.decode.sample_reader import SampleReader
from fathoms.data.errors import BadImageError
from fathoms.data.sampler import Refs
from fathoms.errors import ConfigError
from fathoms.names.registry import check_name


@dataclass
class Chunk:
    """Part of a batch, as a worker delivers it.

    Either `images` (n, 3, size, size), ready; or a buffer of `pixels` (n, 3) with its `layout`, to be resized on the
    device.
    """

    labels: np.ndarray
    images: Tensor | None = None
    pixels: Tensor | None = None
    layout: PixelLayout | None = None


@dataclass(frozen=True)
class TrainTransform:
    """Random crops of `size` pixels; `resize_on` is "worker" or "device"."""

    size: int
    crop: CropOptions
    seed: int
    resize_on: str = "worker"

    def __post_init__(self) -> None:
        check_name(self.resize_on, ("worker", "device"), "place", "resize_on")
        if self.size < 1:
            raise ConfigError(f"size={self.size}: must be at least 1")

    def __call__(self, reader: SampleReader, refs: Refs, epoch: int, allocate: Allocate) -> Chunk:
        """Decode the crops of `refs` into memory from `allocate`."""
        on_device = self.resize_on == "device"
        indices, pixels, layout = decode_crops(
            reader, refs, epoch, self.seed, self.crop, self.size, allocate, resized=not on_device
        )
        labels = reader.source.labels[indices].astype(np.int64)
        return Chunk(labels, None, pixels, layout) if on_device else Chunk(labels, pixels)


@dataclass(frozen=True)
class EvalTransform:
    """The whole image, resized and cropped to its centre; a bad one is black with label -1."""

    size: int
    crop_pct: float = 0.875
    interpolation: str = "bicubic"

    def __call__(self, reader: SampleReader, refs: Refs, _epoch: int, allocate: Allocate) -> Chunk:
        """Decode the images of `refs`; they are the same in every epoch."""
        out = allocate((len(refs), 3, self.size, self.size)).zero_()
        labels = reader.source.labels[refs.index].astype(np.int64)
        for slot, index in enumerate(refs.index):
            try:
                image = reader.open(int(index))
                pixels = reader.decoder.decode(image.data, header=image.header)
            except BadImageError as error:
                reader.bad(reader.source.where(int(index)), str(error))
                labels[slot] = -1
                continue
            out[slot] = evaluation_pixels(pixels, self.size, self.crop_pct, self.interpolation == "bicubic")
        return Chunk(labels, out)
