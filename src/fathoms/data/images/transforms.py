"""Transforms inside a worker: training crops, evaluation, and the user's own function, such as torchvision's.

A bad image is noted by name and, in training, replaced by another that its own key selects: the same one on every
machine, with any number of workers, and after a resume.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fathoms.data.counter_rng import sample_keys
from fathoms.data.images.crops import CropOptions, SampleReader, decode_crops, replacements
from fathoms.data.images.pixels import Allocate, PixelLayout, evaluation_pixels
from fathoms.data.sampler import Refs
from fathoms.data.sources.source import BadImageError, DataError
from fathoms.errors import ConfigError, reason
from fathoms.registry import check_name


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


@dataclass(frozen=True)
class ImageTransform:
    """Any function from a Pillow image (RGB) to a float tensor (3, size, size), for `Loader` and `predict`.

    The generators of torch, numpy and Python are seeded for each sample by a hash of (seed, epoch, sample, repeat): a
    random transform gives the same batches with any number of workers and after a resume. Threads would share these
    generators with the training loop, so a `Loader` runs it in processes.

    Args:
        function: Such as `torchvision.transforms.v2.Compose([...])`; normalisation is its own affair.
        size: Side of the images that it gives.
        seed: Of its random numbers.
        train: In training a bad image is replaced by another that its own key selects, else it is black with label -1.

    >>> from torchvision.transforms import v2
    >>> steps = [v2.Resize((8, 8)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    >>> ImageTransform(v2.Compose(steps), size=8).pixels(Image.new("RGB", (10, 12), "white")).shape
    torch.Size([3, 8, 8])
    """

    function: Callable[[Image.Image], Any]
    size: int
    seed: int = 0
    train: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size={self.size}: must be at least 1")
        try:
            pickle.dumps(self.function)
        # Pickling runs the function's own code, which may raise anything.
        except Exception as error:
            raise ConfigError(
                f"transform: cannot be sent to worker processes ({reason(error)}); "
                "define its functions at the top of a module, without lambda"
            ) from error

    def pixels(self, image: Image.Image) -> Tensor:
        """The model's input for one image; another shape or type is an error."""
        out = self.function(image)
        shape = (3, self.size, self.size)
        if not isinstance(out, Tensor) or not out.is_floating_point() or tuple(out.shape) != shape:
            given = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise DataError(
                f"transform: gives {given}, not a float tensor {shape}; resize to {self.size} pixels, and end with "
                "ToTensor() or ToDtype(torch.float32, scale=True)"
            )
        return out.as_subclass(Tensor).float()

    def __call__(self, reader: SampleReader, refs: Refs, epoch: int, allocate: Allocate) -> Chunk:
        memory = allocate((len(refs), 3, self.size, 4 * self.size)).zero_()
        out, labels = memory.view(torch.float32), np.full(len(refs), -1, np.int64)
        keys = sample_keys(self.seed, epoch, "own", refs.index, refs.repeat)
        for slot, key in enumerate(keys):
            for index in self._candidates(reader, refs, epoch, slot):
                try:
                    encoded = reader.open(index)
                    decoded = reader.decoder.decode(encoded.data, header=encoded.header)
                except BadImageError as error:
                    reader.bad(reader.source.where(index), str(error))
                    continue
                seed_all(int(key))
                out[slot] = self.pixels(Image.fromarray(np.ascontiguousarray(decoded)))
                labels[slot] = reader.source.labels[index]
                break
            else:
                if self.train:
                    raise DataError("data: every replacement of a bad image is bad; run `fathoms data check`")
        return Chunk(labels, out)

    def _candidates(self, reader: SampleReader, refs: Refs, epoch: int, slot: int) -> list[int]:
        if not self.train:
            return [int(refs.index[slot])]
        return list(replacements(self.seed, epoch, refs, slot, len(reader.source)))


def seed_all(key: int) -> None:
    torch.default_generator.manual_seed(key & (2**63 - 1))
    random.seed(key)
    np.random.seed(key & (2**32 - 1))
