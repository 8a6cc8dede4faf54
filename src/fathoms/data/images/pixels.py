"""Pixels: resize on the CPU, and buffers of images of different sizes with their crop, resize and flip in plain torch.

In a buffer RGB is packed into 32-bit words: a device fetches a word as quickly as a byte, so a resize that reads
packed RGB needs one index and one fetch where planes need three. Sums are kept as planes again: an innermost dimension
of three is slow on every device. Each output column (and row) is a weighted sum of a few input columns (rows);
positions and weights are small tables per image, so a batch is a few fetches each way, whatever the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int32, UInt8
from torch import Tensor

from fathoms.data.counter_rng import to_device


def as_planes(pixels: UInt8[np.ndarray, "h w 3"]) -> UInt8[Tensor, "3 h w"]:
    """View HWC pixels as a CHW tensor; copied only where numpy has negative strides (EXIF rotations)."""
    if any(stride < 0 for stride in pixels.strides) or not pixels.flags.writeable:
        pixels = pixels.copy()
    return torch.from_numpy(pixels).permute(2, 0, 1)


def resize(
    pixels: UInt8[np.ndarray, "h w 3"], height: int, width: int, cubic: bool
) -> UInt8[Tensor, "3 height width"]:
    """Resize with an antialiasing bilinear or bicubic filter."""
    planes = as_planes(pixels)
    if planes.shape[1:] == (height, width):
        return planes
    mode = "bicubic" if cubic else "bilinear"
    return F.interpolate(planes[None], (height, width), mode=mode, antialias=True)[0]


def evaluation_geometry(height: int, width: int, size: int, crop_pct: float) -> tuple[int, int, int, int]:
    """Size after the resize, and the corner of the centre crop: (height, width, top, left).

    The shorter side becomes size / crop_pct, then the middle size x size pixels are kept; the
    rounding is torchvision's, which timm's evaluation uses.
    """
    short = math.floor(size / crop_pct)
    if height <= width:
        new_h, new_w = short, int(short * width / height)
    else:
        new_h, new_w = int(short * height / width), short
    return new_h, new_w, round((new_h - size) / 2.0), round((new_w - size) / 2.0)


def evaluation_pixels(
    pixels: UInt8[np.ndarray, "h w 3"], size: int, crop_pct: float = 0.875, cubic: bool = True
) -> UInt8[Tensor, "3 size size"]:
    """Resize the shorter side to size / crop_pct and keep the centre; black where the image is too small."""
    height, width, top, left = evaluation_geometry(pixels.shape[0], pixels.shape[1], size, crop_pct)
    planes = resize(pixels, height, width, cubic)
    if top >= 0 and left >= 0:
        return planes[:, top : top + size, left : left + size]
    # A crop_pct above 1 asks for more than there is.
    out = torch.zeros(3, size, size, dtype=torch.uint8)
    put_y, put_x = max(0, -top), max(0, -left)
    part = planes[:, max(0, top) : max(0, top) + size, max(0, left) : max(0, left) + size]
    out[:, put_y : put_y + part.shape[1], put_x : put_x + part.shape[2]] = part
    return out


# Gives uninitialised memory for bytes of some shape.
Allocate = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class PixelLayout:
    """Where each image and its crop box lie in a pixel buffer: arrays of length B on the host.

    `offset` counts pixels from the start of the buffer, `pitch` pixels from row to row; the box
    (top, left, height, width) may reach outside the image of `size` (h, w): the pixels there are black.
    """

    offset: np.ndarray
    pitch: np.ndarray
    size: np.ndarray
    box: np.ndarray
    flip: np.ndarray
    cubic: np.ndarray


def join_layouts(layouts: Sequence[PixelLayout], lengths: Sequence[int]) -> PixelLayout:
    """The layout of buffers of `lengths` pixels, put one after another."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    offsets = [layout.offset + start for layout, start in zip(layouts, starts, strict=True)]
    names = ("pitch", "size", "box", "flip", "cubic")
    rest = (np.concatenate([getattr(layout, name) for layout in layouts]) for name in names)
    return PixelLayout(np.concatenate(offsets), *rest)


def ragged(images: Sequence[np.ndarray]) -> tuple[UInt8[np.ndarray, "n 3"], np.ndarray, np.ndarray]:
    """Put (h, w, 3) images one after another: (pixels, offset of each, size of each)."""
    sizes = np.array([image.shape[:2] for image in images], np.int64)
    ends = np.cumsum(sizes[:, 0] * sizes[:, 1])
    offsets = np.concatenate([[0], ends[:-1]])
    flat = np.empty((int(ends[-1]), 3), np.uint8)
    for image, offset, end in zip(images, offsets, ends, strict=True):
        flat[offset:end].reshape(image.shape)[...] = image
    return flat, offsets, sizes


def as_words(pixels: UInt8[Tensor, "*shape 3"]) -> Int32[Tensor, "*shape"]:
    """RGB bytes, innermost, as words of red, green, blue and a zero byte."""
    out = torch.zeros((*pixels.shape[:-1], 4), dtype=torch.uint8, device=pixels.device)
    out[..., :3] = pixels
    return out.view(torch.int32).squeeze(-1)


def word_planes(words: Int32[Tensor, "*shape"]) -> UInt8[Tensor, "3 *shape"]:
    """Red, green and blue of words, as planes; nothing is copied."""
    return words.unsqueeze(-1).view(torch.uint8).movedim(-1, 0)[:3]


def words_to_planes(words: Int32[Tensor, "B H W"]) -> UInt8[Tensor, "B 3 H W"]:
    """Images of words, copied, as planes of red, green and blue."""
    return word_planes(words).transpose(0, 1).contiguous()


def add_weighted(
    total: Float[Tensor, "3 *shape"], planes: UInt8[Tensor, "3 *shape"], weight: Float[Tensor, "*ones"]
) -> None:
    if total.device.type == "cpu":
        # A GPU converts bytes as it reads them; a CPU is twice as quick if that is a pass of its own.
        planes = planes.to(torch.float32, memory_format=torch.contiguous_format)
    total.addcmul_(planes, weight)


def _bilinear(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def _bicubic(x: Tensor) -> Tensor:
    # Pillow's and torch's antialiasing filters both take a = -0.5.
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def tap_tables(
    start: Tensor, length: Tensor, limit: Tensor, cubic: Tensor, flip: Tensor, size: int, taps: int
) -> tuple[Int[Tensor, "taps B size"], Float[Tensor, "taps B size"]]:
    """The input positions that each output position depends on, and their weights.

    All positions are absolute and inside the image; weights outside the box or outside the image are zero. The sums
    are normalised over the box alone, so that what lies outside the image counts as black.
    """
    scale = length[:, None].double() / size
    shrink = scale.clamp(min=1)
    reach = torch.where(cubic, 2.0, 1.0)[:, None] * shrink
    out = torch.arange(size, device=start.device, dtype=torch.float64)[None]
    out = torch.where(flip[:, None], size - 1 - out, out)
    centre = (out + 0.5) * scale
    # The rounding of the two ends is Pillow's, so that the taps are the same.
    first = (centre - reach + 0.5).floor().clamp(min=0)
    last = torch.minimum((centre + reach + 0.5).floor(), length[:, None].double())
    tap = torch.arange(taps, device=start.device, dtype=torch.float64)[:, None, None]
    place = first + tap
    distance = (place - centre + 0.5) / shrink
    weight = torch.where(cubic[:, None], _bicubic(distance), _bilinear(distance))
    weight = torch.where(place < last, weight, 0.0)
    weight = weight / weight.sum(0)
    position = place.to(start.dtype) + start[:, None]
    # A tap outside the image has no weight; it only must not read outside the buffer.
    inside = torch.minimum(position.clamp(min=0), limit[:, None] - 1)
    return inside, torch.where(position == inside, weight, 0.0).float()


def tap_count(length: np.ndarray, cubic: np.ndarray, size: int) -> int:
    """The largest number of input positions that one output position depends on, over the batch."""
    reach = np.where(cubic, 2.0, 1.0) * np.maximum(1.0, length / size)
    return int(min(np.ceil(reach).max() * 2 + 1, max(1, length.max())))


def _rounded(total: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Sums as bytes; `total` is overwritten."""
    return total.add_(0.5).clamp_(0, 255).to(torch.uint8)


def resize_columns(
    pixels: Int32[Tensor, " n"], base: Tensor, position: Tensor, weight: Tensor, owner: Tensor
) -> UInt8[Tensor, "3 R size"]:
    """Row r of the result: the row that starts at pixel base[r], resized horizontally as image owner[r] is."""
    total = torch.zeros(3, len(owner), position.shape[2], device=pixels.device)
    for place, share in zip(position, weight, strict=True):
        index = place.index_select(0, owner) + base[:, None]
        fetched = pixels.index_select(0, index.flatten()).view(index.shape)
        add_weighted(total, word_planes(fetched), share.index_select(0, owner))
    return _rounded(total)


def resize_rows(
    columns: UInt8[Tensor, "3 R size"], row: Tensor, weight: Tensor
) -> UInt8[Tensor, "B 3 size size"]:
    """The images, from the list of rows that `resize_columns` made; `row` are places in that list."""
    size = columns.shape[2]
    total = torch.zeros(3, row.shape[1], size, size, device=columns.device)
    for place, share in zip(row, weight, strict=True):
        fetched = columns.index_select(1, place.flatten()).view(total.shape)
        add_weighted(total, fetched, share[..., None])
    return _rounded(total).transpose(0, 1).contiguous()


def _integers(pixels: Tensor) -> type[np.signedinteger]:
    """32-bit indices halve the traffic, wherever they reach far enough."""
    return np.int32 if pixels.numel() < 2**31 else np.int64


def copy_boxes(pixels: Int32[Tensor, " n"], layout: PixelLayout, size: int) -> UInt8[Tensor, "B 3 size size"]:
    """Boxes that already have the final size: one fetch, no weights."""
    numbers = np.stack([layout.offset, layout.pitch, *layout.box[:, :2].T, *(layout.size.T - 1)])
    table, flip = to_device([numbers.astype(_integers(pixels)), layout.flip], pixels.device)
    offset, pitch, top, left, last_row, last_column = table[:, :, None]
    span = torch.arange(size, device=pixels.device, dtype=table.dtype)
    rows, columns = top + span, left + torch.where(flip[:, None], size - 1 - span, span)
    row, column = (
        torch.minimum(rows.clamp(min=0), last_row),
        torch.minimum(columns.clamp(min=0), last_column),
    )
    index = (offset + row * pitch)[:, :, None] + column[:, None]
    inside = (row == rows)[:, :, None] & (column == columns)[:, None]
    fetched = pixels.index_select(0, index.flatten()).view(index.shape)
    return words_to_planes(fetched.mul_(inside))


def resize_boxes(
    pixels: Int32[Tensor, " n"], layout: PixelLayout, size: int
) -> UInt8[Tensor, "B 3 size size"]:
    """Every box of `layout`, resized to size x size with antialiasing, flipped where `layout.flip` says so.

    Within one level of Pillow's crop and resize: both round once after the columns and once after the rows.
    """
    if (layout.box[:, 2:] == size).all():
        return copy_boxes(pixels, layout, size)
    count, (top, left, box_h, box_w), (height, width) = len(layout.box), layout.box.T, layout.size.T
    # The tables of columns and of rows have the same form, so both are computed together.
    length, filters = np.concatenate([box_w, box_h]), np.tile(layout.cubic, 2)
    flip = np.concatenate([layout.flip, np.zeros(count, bool)])
    # First all columns, for just the rows that the boxes touch; the rows of all images in one list.
    row_low, row_high = np.clip(top, 0, height - 1), np.clip(top + box_h, 1, height)
    rows = row_high - row_low
    start = np.cumsum(rows) - rows
    numbers = [[left, top], [box_w, box_h], [width, row_high]]
    shift = [start - row_low, layout.offset + (row_low - start) * layout.pitch]
    integers = _integers(pixels)
    double, single, cubic, flips = to_device(
        [
            np.stack([np.concatenate(pair) for pair in numbers]).astype(integers),
            np.stack([*shift, layout.pitch, rows]).astype(integers),
            filters,
            flip,
        ],
        pixels.device,
    )
    taps = tap_count(length, filters, size)
    begin, extent, limit = double
    position, weight = tap_tables(begin, extent, limit, cubic, flips, size, taps)
    in_list, offset, pitch, each = single
    # A product beyond 2 ** 31 comes back with the sum: 32-bit integers wrap around both ways.
    total = int(rows.sum())
    owner = torch.repeat_interleave(each, output_size=total)
    number = torch.arange(total, device=pixels.device, dtype=each.dtype)
    base = offset.index_select(0, owner) + number * pitch.index_select(0, owner)
    columns = resize_columns(pixels, base, position[:, :count], weight[:, :count], owner)
    return resize_rows(columns, position[:, count:] + in_list[:, None], weight[:, count:])
