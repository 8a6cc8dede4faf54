"""From a list of samples to pixels, inside a worker: read, choose the crop, decode it, resize or hand on.

A bad picture is noted by name and, in training, replaced by another that its own key selects: the
same one on every machine, with any number of workers, and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fathoms.data.crop.decode_crops import Crops
from fathoms.data.crop.pixel_layout import Places
from fathoms.data.crop.random_crop import CropOptions
from fathoms.data.crop.resize import evaluation_pixels
from fathoms.data.decode.sample_reader import Reader
from fathoms.data.errors import BadImageError
from fathoms.data.sampler import Refs
from fathoms.data.workers.shared_memory import Make
from fathoms.errors import ConfigError
from fathoms.registry import check_name


@dataclass
class Chunk:
    """Part of a batch as a worker hands it over.

    Either `images` (n, 3, size, size), ready; or `pixels` with `places`, to be resized on the device.
    """

    labels: np.ndarray
    images: Tensor | None = None
    pixels: Tensor | None = None
    places: Places | None = None


@dataclass(frozen=True)
class TrainView:
    """Random crops of `size` pixels; `resize_on` is "worker" or "device"."""

    size: int
    crop: CropOptions
    seed: int
    resize_on: str = "worker"

    def __post_init__(self) -> None:
        check_name(self.resize_on, ("worker", "device"), "place", "data.resize_on")
        if self.size < 1:
            raise ConfigError(f"data.size={self.size} must be at least 1")

    def prepare(self, reader: Reader, refs: Refs, epoch: int, make: Make) -> Chunk:
        """Decode the crops of `refs` into room that `make` gives."""
        crops = Crops(reader, refs, epoch, self.seed, self.crop, self.size)
        images = pixels = places = None
        if self.resize_on == "device":
            pixels, places = crops.layout(make)
        else:
            images = crops.images(make)
        return Chunk(reader.source.labels[crops.indices].astype(np.int64), images, pixels, places)


@dataclass(frozen=True)
class EvalView:
    """The whole picture, resized and cropped in the middle; a bad one is black with label -1."""

    size: int
    crop_pct: float = 0.875
    interpolation: str = "bicubic"

    def prepare(self, reader: Reader, refs: Refs, _epoch: int, make: Make) -> Chunk:
        """Decode the pictures of `refs`; they are the same in every epoch."""
        out = make((len(refs), 3, self.size, self.size)).zero_()
        labels = reader.source.labels[refs.index].astype(np.int64)
        for slot, index in enumerate(refs.index):
            try:
                one = reader.open(int(index))
                pixels = reader.decoder.decode(one.data, header=one.header)
            except BadImageError as error:
                reader.bad(reader.source.where(int(index)), str(error))
                labels[slot] = -1
                continue
            planes = evaluation_pixels(pixels, self.size, self.crop_pct, self.interpolation == "bicubic")
            out[slot] = planes
        return Chunk(labels, out)
