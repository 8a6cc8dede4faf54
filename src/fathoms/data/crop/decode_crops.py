"""The random crops of a chunk of samples, from bytes to pixels.

Other threads launch the training step meanwhile and need Python's lock for every launch. So what a sample
costs while that lock is held is kept small: the boxes of a chunk are drawn together, and a crop is decoded
straight into the memory that goes to the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fathoms.data.counter_rng import sample_keys
from fathoms.data.crop.pixel_layout import Places
from fathoms.data.crop.random_crop import CropOptions, draw_boxes, part_inside
from fathoms.data.crop.resize import resize
from fathoms.data.decode.decode import Box
from fathoms.data.decode.sample_reader import Opened, Reader, candidates
from fathoms.data.decode.turbojpeg import columns
from fathoms.data.device.resize import ragged
from fathoms.data.errors import BadImageError
from fathoms.data.sampler import Refs
from fathoms.data.workers.shared_memory import Make

# A crop with more than this many times the pixels of the result is resized by the worker even where the
# device does the rest: moving a 12-megapixel photo over the bus costs more than shrinking it.
_LARGE = 4


def most_bytes(size: int) -> int:
    """What one crop takes at most before it is resized to `size`."""
    return 3 * _LARGE * size**2


class Crops:
    """Samples opened and their boxes drawn; then either `images` or `layout`, once.

    A picture that does not decode is replaced by another, so `indices` is right only after that.
    """

    def __init__(
        self, reader: Reader, refs: Refs, epoch: int, seed: int, options: CropOptions, size: int
    ) -> None:
        self.reader, self.refs, self.epoch, self.seed = reader, refs, epoch, seed
        self.options, self.size = options, size
        self.keys = sample_keys(seed, epoch, "crop", refs.index, refs.repeat)
        # All headers first, so that the boxes are drawn in one go.
        self.opened = [reader.open_first(self._candidates(slot)) for slot in range(len(refs))]
        self.boxes, self.flips, self.cubics, self.inside = self._draw(self.opened, self.keys)

    @property
    def indices(self) -> list[int]:
        """Which sample each slot holds."""
        return [one.index for one in self.opened]

    def images(self, make: Make) -> Tensor:
        """Every crop resized and mirrored here: (n, 3, size, size), in room that `make` gives."""
        out = make((len(self.refs), 3, self.size, self.size))
        for slot, flip in enumerate(self.flips.tolist()):
            # A crop is dropped as soon as it is resized: a chunk of large photos would fill the memory.
            planes = self._resized(slot, self._pixels(slot))
            out[slot] = planes.flip(2) if flip else planes
        return out

    def layout(self, make: Make) -> tuple[Tensor, Places]:
        """Every crop as it was decoded, behind one another: pixels (n, 3), and where each picture lies.

        They lie in room that `make` gives, at most `most_bytes` for each.
        """
        offset, pitch = [0] * len(self.refs), [0] * len(self.refs)
        others: dict[int, np.ndarray] = {}
        regions: list[tuple[int, int, tuple[int, int, int, int]]] = []
        room = 0
        for slot, (top, left, height, width) in enumerate(self.inside):
            header = self.opened[slot].header
            in_place = self.reader.decoder.in_place(header)
            start, wide = columns(header, left, width) if in_place else (0, 0)
            if 0 < height * wide <= _LARGE * self.size**2:
                regions.append((slot, room, (start, top, wide, height)))
                offset[slot], pitch[slot] = room + left - start, wide
                room += height * wide
            else:
                others[slot] = self._small(slot, self._pixels(slot))
        pixels = make((room, 3))
        failed = dict(self._decode_in_place(pixels.data_ptr(), regions))
        if failed:
            # Another one's crop may need more room than the bad one had, so all of them are laid out anew.
            good = [region for region in regions if region[0] not in failed]
            others |= {slot: self._cut_out(pixels, slot, before, region) for slot, before, region in good}
            others |= {slot: self._small(slot, pixel) for slot, pixel in failed.items()}
            room = 0
        size = np.array([box[2:] for box in self.inside], np.int64)
        places = Places(np.array(offset), np.array(pitch), size, self.boxes, self.flips, self.cubics)
        if others:
            slots = list(others)
            flat, start, size[slots] = ragged(list(others.values()))
            places.offset[slots], places.pitch[slots] = room + start, size[slots, 1]
            joined = make((room + len(flat), 3))
            joined[:room], joined[room:] = pixels[:room], torch.from_numpy(flat)
            pixels = joined
        return pixels, places

    def _decode_in_place(
        self, address: int, regions: list[tuple[int, int, tuple[int, int, int, int]]]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Decode each (slot, pixels before it, region); yields the slots that need another sample, with it."""
        library = self.reader.decoder.library
        # Where there is no library nothing can be decoded in place, and there are no regions.
        if library is None:
            return
        for slot, before, region in regions:
            one = self.opened[slot]
            self.reader.begin(one.name)
            try:
                library.decode_to(address + 3 * before, one.data, region)
            except BadImageError as error:
                yield slot, self._stand_in(slot, error)

    def _candidates(self, slot: int) -> Iterator[int]:
        return candidates(self.seed, self.epoch, self.refs, slot, len(self.reader.source))

    def _draw(
        self, opened: list[Opened], keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Box]]:
        """Boxes, flips and filters, and the part of each box that has pixels, where `boxes` is at home."""
        sizes = np.array([one.header.shown for one in opened], np.int64)
        boxes, flips, cubics = draw_boxes(sizes, keys, self.options)
        inside = part_inside(boxes, sizes)
        return boxes, flips, cubics, [(a, b, c, d) for a, b, c, d in inside.tolist()]

    def _pixels(self, slot: int) -> np.ndarray:
        """The crop of a slot; of another sample, where its own is bad."""
        try:
            return self._decode(self.opened[slot], self.inside[slot])
        except BadImageError as error:
            return self._stand_in(slot, error)

    def _decode(self, one: Opened, box: Box) -> np.ndarray:
        self.reader.begin(one.name)
        return self.reader.decoder.decode(one.data, box, one.header)

    def _stand_in(self, slot: int, error: BadImageError) -> np.ndarray:
        """The crop of another sample for a slot whose own did not decode."""
        others = self._candidates(slot)
        next(others)
        one = self.opened[slot]
        while True:
            self.reader.bad(one.name, str(error))
            one = self.reader.open_first(others)
            boxes, _, _, (inside,) = self._draw([one], self.keys[slot : slot + 1])
            self.opened[slot], self.boxes[slot], self.inside[slot] = one, boxes[0], inside
            try:
                return self._decode(one, inside)
            except BadImageError as again:
                error = again

    def _cut_out(
        self, pixels: Tensor, slot: int, before: int, region: tuple[int, int, int, int]
    ) -> np.ndarray:
        """A copy of a crop that was decoded in place, without its margin."""
        _, left, _, width = self.inside[slot]
        start, _, wide, height = region
        whole = pixels[before : before + wide * height].view(height, wide, 3)
        return whole[:, left - start : left - start + width].contiguous().clone().numpy()

    def _small(self, slot: int, pixels: np.ndarray) -> np.ndarray:
        """The crop; where it is large, already resized."""
        if pixels.size <= 3 * _LARGE * self.size**2:
            return pixels
        planes = self._resized(slot, pixels)
        self.boxes[slot] = 0, 0, self.size, self.size
        return planes.permute(1, 2, 0).contiguous().numpy()

    def _resized(self, slot: int, pixels: np.ndarray) -> Tensor:
        top, left, height, width = self.boxes[slot].tolist()
        if (height, width) != pixels.shape[:2]:
            padded = np.zeros((height, width, 3), np.uint8)
            padded[-top : pixels.shape[0] - top, -left : pixels.shape[1] - left] = pixels
            pixels = padded
        return resize(pixels, self.size, self.size, bool(self.cubics[slot]))
