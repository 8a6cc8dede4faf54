"""Decode the random crops of a few samples, from encoded bytes to pixels.

Other threads launch the training update meanwhile and need the GIL for every launch. So a sample costs little while
the GIL is held: the crop boxes of all samples are drawn together, and a crop is decoded straight into the memory that
goes to the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fathoms.data.counter_rng import sample_keys
from fathoms.data.crop.pixel_buffer import Allocate, PixelLayout, ragged
from fathoms.data.crop.random_crop import CropOptions, draw_boxes
from fathoms.data.crop.resize import resize
from fathoms.data.decode.decode import Box
from fathoms.data.decode.sample_reader import EncodedImage, SampleReader, replacements
from fathoms.data.errors import BadImageError
from fathoms.data.sampler import Refs

# A crop with more than this many times the pixels of the result is resized by the worker even where the
# device does the rest: moving 12 megapixels over the bus costs more than shrinking it.
_LARGE = 4


def most_bytes(size: int) -> int:
    """Size of the largest crop before it is resized to `size`."""
    return 3 * _LARGE * size**2


def decode_crops(
    reader: SampleReader,
    refs: Refs,
    epoch: int,
    seed: int,
    options: CropOptions,
    size: int,
    allocate: Allocate,
    *,
    resized: bool,
) -> tuple[list[int], Tensor, PixelLayout | None]:
    """Read `refs`, draw their crop boxes and decode these.

    Returns:
        The index of each sample, which is another's where its own was bad; then either images (n, 3, size, size) and
        None, if `resized`; or a buffer of the crops as they were decoded, one after another, and its layout.
    """
    crops = _Crops(reader, refs, epoch, seed, options, size)
    layout = None
    if resized:
        pixels = crops.images(allocate)
    else:
        pixels, layout = crops.buffer(allocate)
    return [image.index for image in crops.opened], pixels, layout


class _Crops:
    """Samples opened and their boxes drawn; then either `images` or `buffer`, once."""

    def __init__(
        self, reader: SampleReader, refs: Refs, epoch: int, seed: int, options: CropOptions, size: int
    ) -> None:
        self.reader, self.refs, self.epoch, self.seed = reader, refs, epoch, seed
        self.options, self.size = options, size
        self.keys = sample_keys(seed, epoch, "crop", refs.index, refs.repeat)
        # All headers first, so that the boxes are drawn together.
        self.opened = [reader.open_first(self._candidates(slot)) for slot in range(len(refs))]
        self.boxes, self.flips, self.cubics, self.inside = self._draw(self.opened, self.keys)

    def _candidates(self, slot: int) -> Iterator[int]:
        return replacements(self.seed, self.epoch, self.refs, slot, len(self.reader.source))

    def _draw(
        self, opened: list[EncodedImage], keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Box]]:
        """Boxes, flips and filters; and the part of each box inside its image, whose corner boxes count from."""
        sizes = np.array([image.header.shown for image in opened], np.int64)
        boxes, flips, cubics = draw_boxes(sizes, keys, self.options)
        low = np.maximum(boxes[:, :2], 0)
        inside = np.concatenate([low, np.minimum(boxes[:, :2] + boxes[:, 2:], sizes) - low], axis=1)
        boxes[:, :2] -= low
        return boxes, flips, cubics, [(a, b, c, d) for a, b, c, d in inside.tolist()]

    def images(self, allocate: Allocate) -> Tensor:
        """Every crop resized and flipped here: (n, 3, size, size)."""
        out = allocate((len(self.refs), 3, self.size, self.size))
        for slot, flip in enumerate(self.flips.tolist()):
            # A crop is dropped as soon as it is resized: a chunk of large images would fill the memory.
            planes = self._resize(slot, self._decode_one(slot))
            out[slot] = planes.flip(2) if flip else planes
        return out

    def buffer(self, allocate: Allocate) -> tuple[Tensor, PixelLayout]:
        """Every crop as it was decoded, at most `most_bytes` each: pixels (n, 3) and their layout."""
        # The usual case: a JPEG's crop is written straight to the buffer.
        pixels, offset, pitch, failed = self._decode_in_place(allocate)
        used = len(pixels)
        others = {slot: self._shrink(slot, self._replace(slot, error)) for slot, error in failed.items()}
        for slot in np.flatnonzero(pitch == 0).tolist():
            if slot not in failed:
                others[slot] = self._shrink(slot, self._decode_one(slot))
        if failed:
            # The replacement's crop may need more memory than the bad one had, so the whole buffer is made anew.
            for slot in np.flatnonzero(pitch).tolist():
                others[slot] = self._copy_out(pixels, slot, int(offset[slot]), int(pitch[slot]))
            used = 0
        size = np.array([box[2:] for box in self.inside], np.int64)
        if others:
            slots = list(others)
            flat, start, size[slots] = ragged(list(others.values()))
            offset[slots], pitch[slots] = used + start, size[slots, 1]
            joined = allocate((used + len(flat), 3))
            joined[:used], joined[used:] = pixels[:used], torch.from_numpy(flat)
            pixels = joined
        return pixels, PixelLayout(offset, pitch, size, self.boxes, self.flips, self.cubics)

    def _decode_in_place(
        self, allocate: Allocate
    ) -> tuple[Tensor, np.ndarray, np.ndarray, dict[int, BadImageError]]:
        """The buffer of the crops that can be decoded in place; pitch 0 where one is not in it; errors by slot."""
        offset, pitch = np.zeros(len(self.refs), np.int64), np.zeros(len(self.refs), np.int64)
        library = self.reader.decoder.library
        slots = [slot for slot, image in enumerate(self.opened) if image.in_place]
        if library is None or not slots:
            return allocate((0, 3)), offset, pitch, {}
        crops = [(self.opened[slot], self.inside[slot]) for slot in slots]
        pixels, offset[slots], pitch[slots], failed = library.decode_crops(
            [(image.name, image.data, image.header, box) for image, box in crops],
            _LARGE * self.size**2,
            allocate,
            self.reader.begin,
        )
        return pixels, offset, pitch, {slots[number]: error for number, error in failed.items()}

    def _decode_one(self, slot: int) -> np.ndarray:
        """The crop of a slot; of another sample, where its own is bad."""
        try:
            return self._decode(self.opened[slot], self.inside[slot])
        except BadImageError as error:
            return self._replace(slot, error)

    def _decode(self, image: EncodedImage, box: Box) -> np.ndarray:
        self.reader.begin(image.name)
        return self.reader.decoder.decode(image.data, box, image.header)

    def _replace(self, slot: int, error: BadImageError) -> np.ndarray:
        """The crop of another sample for a slot whose own did not decode."""
        others = self._candidates(slot)
        next(others)
        image = self.opened[slot]
        while True:
            self.reader.bad(image.name, str(error))
            image = self.reader.open_first(others)
            boxes, _, _, (inside,) = self._draw([image], self.keys[slot : slot + 1])
            self.opened[slot], self.boxes[slot], self.inside[slot] = image, boxes[0], inside
            try:
                return self._decode(image, inside)
            except BadImageError as again:
                error = again

    def _copy_out(self, pixels: Tensor, slot: int, offset: int, pitch: int) -> np.ndarray:
        """A copy of a crop that was decoded in place, without its margin."""
        _, _, height, width = self.inside[slot]
        rows = offset + pitch * np.arange(height)[:, None] + np.arange(width)
        return pixels.numpy()[rows]

    def _shrink(self, slot: int, pixels: np.ndarray) -> np.ndarray:
        """The crop; where it is large, resized already."""
        if pixels.size <= most_bytes(self.size):
            return pixels
        planes = self._resize(slot, pixels)
        self.boxes[slot] = 0, 0, self.size, self.size
        return planes.permute(1, 2, 0).contiguous().numpy()

    def _resize(self, slot: int, pixels: np.ndarray) -> Tensor:
        top, left, height, width = self.boxes[slot].tolist()
        if (height, width) != pixels.shape[:2]:
            padded = np.zeros((height, width, 3), np.uint8)
            padded[-top : pixels.shape[0] - top, -left : pixels.shape[1] - left] = pixels
            pixels = padded
        return resize(pixels, self.size, self.size, bool(self.cubics[slot]))
