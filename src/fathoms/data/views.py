"""From a list of samples to pixels, inside a worker: read, choose the crop, decode it, resize or hand on.

A bad picture is noted by name and, in training, replaced by another that its own key selects: the
same one on every machine, with any number of workers, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fathoms.data.boxes import Places, ragged
from fathoms.data.counter import sample_keys, uniforms
from fathoms.data.crop import CropOptions, draw_boxes
from fathoms.data.decode import Decoder
from fathoms.data.errors import BadImageError, DataError
from fathoms.data.header import ImageHeader
from fathoms.data.plan import Refs
from fathoms.data.resize import evaluation_pixels, resize
from fathoms.data.sources.base import Source
from fathoms.errors import ConfigError
from fathoms.registry import check_name

# A slot gives up after this many bad candidates in a row; the allowed share is exceeded long before.
_CANDIDATES = 32
# A crop with more than this many times the pixels of the result is resized by the worker even where the
# device does the rest: moving a 12-megapixel photo over the bus costs more than shrinking it.
_LARGE = 4


@dataclass(frozen=True)
class Reader:
    """Where bytes come from and how they are decoded; `begin` and `bad` report to the loader."""

    source: Source
    decoder: Decoder
    begin: Callable[[str], None]
    bad: Callable[[str, str], None]

    def header(self, index: int) -> tuple[bytes, ImageHeader]:
        """Bytes and header of one picture; raises `BadImageError`."""
        self.begin(self.source.where(index))
        try:
            data = self.source.read(index)
        # A file that vanished or cannot be read is a bad picture as much as one that is damaged.
        except OSError as error:
            raise BadImageError(f"cannot be read ({error.strerror or error})") from error
        return data, self.decoder.header(data)


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

    def prepare(self, reader: Reader, refs: Refs, epoch: int, pin: bool) -> Chunk:
        """Decode the crops of `refs`."""
        keys = sample_keys(self.seed, epoch, "crop", refs.index, refs.repeat)
        # All headers first, so that the crops of a chunk are drawn in one go.
        indices, opened = [], []
        for slot in range(len(refs)):
            index, data, header = self._open(
                reader, candidates(self.seed, epoch, refs, slot, len(reader.source))
            )
            indices.append(index)
            opened.append((data, header))
        boxes, flips, cubics = draw_boxes(np.array([header.shown for _, header in opened]), keys, self.crop)
        on_device = self.resize_on == "device"
        crops: list[np.ndarray] = []
        out = torch.empty(
            0 if on_device else len(refs), 3, self.size, self.size, dtype=torch.uint8, pin_memory=pin
        )
        for slot, (data, header) in enumerate(opened):
            try:
                pixels = self._decode(reader, indices[slot], data, header, boxes[slot])
            except BadImageError as error:
                reader.bad(reader.source.where(indices[slot]), str(error))
                indices[slot], boxes[slot], pixels = self._stand_in(
                    reader, refs, slot, epoch, keys[slot : slot + 1]
                )
            if on_device and pixels.size <= 3 * _LARGE * self.size**2:
                crops.append(pixels)
                continue
            # A crop is dropped as soon as it is resized: a chunk of large photos would fill the memory.
            planes = self._resized(pixels, boxes[slot], bool(cubics[slot]))
            if on_device:
                crops.append(planes.permute(1, 2, 0).contiguous().numpy())
                boxes[slot] = 0, 0, self.size, self.size
            else:
                out[slot] = planes.flip(2) if flips[slot] else planes
        chunk = Chunk(reader.source.labels[indices].astype(np.int64))
        if not on_device:
            chunk.images = out
            return chunk
        flat, offset, size = ragged(crops)
        tensor = torch.from_numpy(flat)
        chunk.pixels = tensor.pin_memory() if pin else tensor
        chunk.places = Places(offset, size[:, 1], size, boxes, flips, cubics)
        return chunk

    def _open(self, reader: Reader, indices: Iterable[int]) -> tuple[int, bytes, ImageHeader]:
        """The first of `indices` whose header can be read."""
        for index in indices:
            try:
                return index, *reader.header(index)
            except BadImageError as error:
                reader.bad(reader.source.where(index), str(error))
        raise DataError(f"data: {_CANDIDATES} bad images in a row; run `fathoms data check`")

    def _decode(
        self, reader: Reader, index: int, data: bytes, header: ImageHeader, box: np.ndarray
    ) -> np.ndarray:
        """The pixels of `box`, which is moved to their coordinates; outside the picture there are none."""
        reader.begin(reader.source.where(index))
        top, left, height, width = box.tolist()
        y, x = max(0, top), max(0, left)
        bottom, right = min(header.shown[0], top + height), min(header.shown[1], left + width)
        pixels = reader.decoder.decode(data, (y, x, bottom - y, right - x), header)
        box[:2] = top - y, left - x
        return pixels

    def _stand_in(
        self, reader: Reader, refs: Refs, slot: int, epoch: int, key: np.ndarray
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """Another sample for a slot whose own did not decode: (index, box, pixels)."""
        others = candidates(self.seed, epoch, refs, slot, len(reader.source))
        next(others)
        while True:
            index, data, header = self._open(reader, others)
            boxes, _, _ = draw_boxes(np.array([header.shown]), key, self.crop)
            try:
                return index, boxes[0], self._decode(reader, index, data, header, boxes[0])
            except BadImageError as error:
                reader.bad(reader.source.where(index), str(error))

    def _resized(self, pixels: np.ndarray, box: np.ndarray, cubic: bool) -> Tensor:
        top, left, height, width = (int(value) for value in box)
        if (height, width) != pixels.shape[:2]:
            padded = np.zeros((height, width, 3), np.uint8)
            padded[-top : pixels.shape[0] - top, -left : pixels.shape[1] - left] = pixels
            pixels = padded
        return resize(pixels, self.size, self.size, cubic)


@dataclass(frozen=True)
class EvalView:
    """The whole picture, resized and cropped in the middle; a bad one is black with label -1."""

    size: int
    crop_pct: float = 0.875
    interpolation: str = "bicubic"

    def prepare(self, reader: Reader, refs: Refs, _epoch: int, pin: bool) -> Chunk:
        """Decode the pictures of `refs`; they are the same in every epoch."""
        out = torch.zeros(len(refs), 3, self.size, self.size, dtype=torch.uint8, pin_memory=pin)
        labels = reader.source.labels[refs.index].astype(np.int64)
        for slot, index in enumerate(refs.index):
            try:
                data, header = reader.header(int(index))
                pixels = reader.decoder.decode(data, header=header)
            except BadImageError as error:
                reader.bad(reader.source.where(int(index)), str(error))
                labels[slot] = -1
                continue
            planes = evaluation_pixels(pixels, self.size, self.crop_pct, self.interpolation == "bicubic")
            out[slot] = planes
        return Chunk(labels, out)


def candidates(seed: int, epoch: int, refs: Refs, slot: int, size: int) -> Iterator[int]:
    """The sample a slot asks for, then the ones that stand in for it, in order."""
    index, repeat = int(refs.index[slot]), int(refs.repeat[slot])
    yield index
    key = sample_keys(seed, epoch, "replace", [index], [repeat])
    for other in uniforms(key, _CANDIDATES)[0]:
        yield int(other * size)
