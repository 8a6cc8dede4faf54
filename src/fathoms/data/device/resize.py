"""Crop, resize and flip a batch of images of different sizes on the device, in plain torch.

The images lie one after another in a pixel buffer, a 32-bit word for each pixel. Each output column (and row) is a
weighted sum of a few input columns (rows); positions and weights are small tables per image, so a batch is a few
fetches each way, whatever the sizes. The same function serves a ragged batch from the workers and a data set that
is kept on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, UInt8
from torch import Tensor

from fathoms.data.crop.pixel_buffer import PixelLayout, add_weighted, word_planes, words_to_planes
from fathoms.data.to_device import to_device


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
