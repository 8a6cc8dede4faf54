"""Random crops for training: boxes drawn from sizes and random numbers, then read and decoded, the crop alone.

Other threads launch the training update meanwhile and need the GIL for every launch. So a sample costs little while
the GIL is held: the crop boxes of all samples are drawn together, and a crop is decoded straight into the memory that
goes to the device. A bad image is replaced by another that its own key selects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fathoms.config_checks import check_ranges, ranged
from fathoms.data.counter_rng import sample_keys, uniforms
from fathoms.data.images.decode import Box, Decoder
from fathoms.data.images.image_header import ImageHeader
from fathoms.data.images.pixels import Allocate, PixelLayout, cut, ragged, resize
from fathoms.data.sampler import Refs
from fathoms.data.sources.source import BadImageError, DataError, Source
from fathoms.errors import ConfigError
from fathoms.registry import Registry, check_name

# Random numbers of a key: ten areas, ten aspects, then top, left, flip and filter.
TRIES = 10
# Up to this many images a call costs more than its arithmetic.
_FEW = 64
FILTERS = ("random", "bilinear", "bicubic")

CROPS: Registry[np.ndarray, None] = Registry("crop")


@dataclass(frozen=True)
class CropOptions:
    """Options of training crops; each has the name of its flag."""

    crop: str = "resized"
    """resized: RandomResizedCrop; pad: shift by up to `crop_padding` pixels, black outside; whole: the whole image."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the area, for `resized`."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height, for `resized`."""
    crop_padding: int = ranged(4, least=0)
    """Pixels on each side, for `pad`."""
    hflip: float = ranged(0.5, least=0, most=1)
    """Probability of a horizontal flip."""
    train_interpolation: str = "random"
    """bilinear, bicubic, or random: one of the two for each sample."""

    def __post_init__(self) -> None:
        check_ranges(self, "--")
        CROPS.check(self.crop, "--crop")
        check_name(self.train_interpolation, FILTERS, "filter", "--train-interpolation")
        (low, high), (narrow, wide) = self.scale, self.ratio
        if not 0 < low <= high <= 1:
            raise ConfigError(f"--scale {low} {high}: must be two rising shares of the area, in (0, 1]")
        if not 0 < narrow <= wide:
            raise ConfigError(f"--ratio {narrow} {wide}: must be two rising positive numbers")


@CROPS.add("resized")
def resized_boxes(sizes: np.ndarray, keys: np.ndarray, place: np.ndarray, options: CropOptions) -> np.ndarray:
    """RandomResizedCrop: the first of ten (area, aspect) draws that fits, else a centred crop."""
    height, width = sizes.T.astype(float)
    whole = height * width
    crop_h, crop_w = np.empty_like(height), np.empty_like(width)
    low, high = options.scale
    log_low, log_high = math.log(options.ratio[0]), math.log(options.ratio[1])
    rows = np.arange(len(sizes))
    # Most images take their first try, so of many images the other nine are drawn for the rest alone.
    for begin, count in ((0, TRIES),) if len(sizes) <= _FEW else ((0, 1), (1, TRIES - 1)):
        area = whole[rows, None] * (low + (high - low) * uniforms(keys[rows], count, begin))
        aspect = np.exp(log_low + (log_high - log_low) * uniforms(keys[rows], count, TRIES + begin))
        wides, talls = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (wides <= width[rows, None]) & (talls <= height[rows, None]) & (wides >= 1) & (talls >= 1)
        chosen = np.arange(len(rows)), fits.argmax(axis=1)
        crop_h[rows], crop_w[rows] = talls[chosen], wides[chosen]
        rows = rows[~fits[chosen]]
    if len(rows):
        # A very long image fits no draw: take the widest crop the aspect range allows.
        h, w = height[rows], width[rows]
        narrow, wide = w / h < options.ratio[0], w / h > options.ratio[1]
        crop_h[rows] = np.where(narrow, np.maximum(1, np.rint(w / options.ratio[0])), h)
        crop_w[rows] = np.where(wide, np.maximum(1, np.rint(h * options.ratio[1])), w)
    top = np.floor(place[:, 0] * (height - crop_h + 1))
    left = np.floor(place[:, 1] * (width - crop_w + 1))
    # Of a long image the centre is taken.
    top[rows], left[rows] = (height - crop_h)[rows] // 2, (width - crop_w)[rows] // 2
    return np.stack([top, left, crop_h, crop_w], axis=1).astype(np.int64)


@CROPS.add("pad")
def padded_boxes(sizes: np.ndarray, _: np.ndarray, place: np.ndarray, options: CropOptions) -> np.ndarray:
    """The whole image shifted by up to `crop_padding` pixels, never out of sight; black outside."""
    reach = np.minimum(options.crop_padding, sizes - 1)
    corner = np.floor(place * (2 * reach + 1)) - reach
    return np.concatenate([corner.astype(np.int64), sizes], axis=1)


@CROPS.add("whole")
def whole_boxes(sizes: np.ndarray, *_: object) -> np.ndarray:
    """The whole image, squeezed to a square."""
    return np.concatenate([np.zeros_like(sizes), sizes], axis=1)


def draw_boxes(
    sizes: np.ndarray, keys: np.ndarray, options: CropOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw a crop for each image, from its size (n, 2) and its key.

    Returns:
        Boxes (n, 4) of top, left, height and width; whether each is flipped; whether its filter is bicubic.
    """
    rest = uniforms(keys, 4, 2 * TRIES)
    boxes = CROPS[options.crop](sizes.astype(np.int64), keys, rest[:, :2], options)
    flip, cubic = rest[:, 2:].T
    if options.train_interpolation == "random":
        return boxes, flip < options.hflip, cubic < 0.5
    return boxes, flip < options.hflip, np.full(len(sizes), options.train_interpolation == "bicubic")


# Give up after this many bad images in a row; the allowed share is exceeded long before.
_CANDIDATES = 32


class EncodedImage(NamedTuple):
    """An image that was read but not decoded."""

    index: int
    name: str
    data: bytes
    header: ImageHeader
    in_place: bool
    """Whether `Decoder.library` can decode a crop of it straight to where it is wanted."""


@dataclass(frozen=True)
class SampleReader:
    """The source of encoded images and their decoder; `begin` and `bad` report to the loader."""

    source: Source
    decoder: Decoder
    begin: Callable[[str], None]
    bad: Callable[[str, str], None]

    def open(self, index: int) -> EncodedImage:
        """Bytes and header of one image; raises `BadImageError`."""
        name = self.source.where(index)
        self.begin(name)
        try:
            data = self.source.read(index)
        # A file that vanished or cannot be read is as bad as one that is damaged.
        except OSError as error:
            raise BadImageError(f"cannot be read ({error.strerror or error})") from error
        header = self.decoder.header(data)
        return EncodedImage(index, name, data, header, self.decoder.in_place(header))

    def open_first(self, indices: Iterable[int]) -> EncodedImage:
        """The first of `indices` whose header can be read."""
        for index in indices:
            try:
                return self.open(index)
            except BadImageError as error:
                self.bad(self.source.where(index), str(error))
        raise DataError(f"data: {_CANDIDATES} bad images in a row; run `fathoms data check`")


def replacements(seed: int, epoch: int, refs: Refs, slot: int, size: int) -> Iterator[int]:
    """The sample of a slot, then those that replace it if it is bad, in order."""
    index, repeat = int(refs.index[slot]), int(refs.repeat[slot])
    yield index
    key = sample_keys(seed, epoch, "replace", [index], [repeat])
    for other in uniforms(key, _CANDIDATES)[0]:
        yield int(other * size)


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
    pixels, layout = (crops.images(allocate), None) if resized else crops.buffer(allocate)
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
        pixels, offset, pitch = self._decode_in_place(allocate)
        used = len(pixels)
        others = {
            slot: self._shrink(slot, self._decode_one(slot)) for slot in np.flatnonzero(pitch == 0).tolist()
        }
        size = np.array([box[2:] for box in self.inside], np.int64)
        if others:
            slots = list(others)
            flat, start, size[slots] = ragged(list(others.values()))
            offset[slots], pitch[slots] = used + start, size[slots, 1]
            joined = allocate((used + len(flat), 3))
            joined[:used], joined[used:] = pixels[:used], torch.from_numpy(flat)
            pixels = joined
        return pixels, PixelLayout(offset, pitch, size, self.boxes, self.flips, self.cubics)

    def _decode_in_place(self, allocate: Allocate) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """The buffer of the crops that can be decoded in place; offset of each, and pitch, 0 where it is not in it."""
        offset, pitch = np.zeros((2, len(self.refs)), np.int64)
        library = self.reader.decoder.library
        slots = [slot for slot, image in enumerate(self.opened) if image.in_place]
        if library is None or not slots:
            return allocate((0, 3)), offset, pitch
        crops = [(self.opened[slot], self.inside[slot]) for slot in slots]
        try:
            pixels, offset[slots], pitch[slots] = library.decode_crops(
                [(image.name, image.data, image.header, box) for image, box in crops],
                _LARGE * self.size**2,
                allocate,
                self.reader.begin,
            )
        except BadImageError:
            # A replacement's crop may need more memory than the bad one: all are decoded again, one by one.
            return allocate((0, 3)), offset, pitch
        return pixels, offset, pitch

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

    def _shrink(self, slot: int, pixels: np.ndarray) -> np.ndarray:
        """The crop; where it is large, resized already."""
        if pixels.size <= most_bytes(self.size):
            return pixels
        planes = self._resize(slot, pixels)
        self.boxes[slot] = 0, 0, self.size, self.size
        return planes.permute(1, 2, 0).contiguous().numpy()

    def _resize(self, slot: int, pixels: np.ndarray) -> Tensor:
        box = cut(pixels, self.boxes[slot].tolist())
        return resize(box, self.size, self.size, bool(self.cubics[slot]))
