"""Crop, resize and mirror a whole batch of differently sized pictures on the device, in plain torch.

The pictures lie behind one another in a flat buffer of RGB bytes. Each output column (and row) is a
weighted sum of a few input columns (rows); positions and weights are small tables per picture, so a
batch is two gathers, whatever the sizes. The same function serves a ragged batch from the workers
and a data set that lives on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from fathoms.data.device import to_device


@dataclass(frozen=True)
class Places:
    """Where each picture and its box lie: arrays of length B on the host.

    `offset` counts pixels from the start of the buffer, `pitch` pixels from row to row; the box
    (top, left, height, width) may reach outside (h, w), and what it takes from there is black.
    """

    offset: np.ndarray
    pitch: np.ndarray
    size: np.ndarray
    box: np.ndarray
    flip: np.ndarray
    cubic: np.ndarray


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
) -> tuple[Int64[Tensor, "B size"], Float[Tensor, "B size taps"]]:
    """First input position and the weights of each output position, per picture.

    All positions are absolute; weights outside the box or outside the picture are zero. The sums
    are normalised over the box alone, so that what lies outside the picture counts as black.
    """
    scale = length[:, None].double() / size
    reach = torch.where(cubic, 2.0, 1.0)[:, None] * scale.clamp(min=1)
    out = torch.arange(size, device=start.device, dtype=torch.float64)[None]
    out = torch.where(flip[:, None], size - 1 - out, out)
    centre = (out + 0.5) * scale
    # The rounding of the two ends is Pillow's, so that the same taps take part.
    first = (centre - reach + 0.5).floor().clamp(min=0)
    last = torch.minimum((centre + reach + 0.5).floor(), length[:, None].double())
    tap = torch.arange(taps, device=start.device, dtype=torch.float64)
    place = first[..., None] + tap
    distance = (place - centre[..., None] + 0.5) / scale.clamp(min=1)[..., None]
    weight = torch.where(cubic[:, None, None], _bicubic(distance), _bilinear(distance))
    weight = torch.where(place < last[..., None], weight, 0.0)
    weight = weight / weight.sum(-1, keepdim=True)
    begin = first.long() + start[:, None]
    absolute = begin[..., None] + torch.arange(taps, device=start.device)
    inside = (absolute >= 0) & (absolute < limit[:, None, None])
    return begin, torch.where(inside, weight, 0.0).float()


def tap_count(length: np.ndarray, cubic: np.ndarray, size: int, multiple: int = 1) -> int:
    """How many input positions one output position can depend on, over the batch."""
    reach = np.where(cubic, 2.0, 1.0) * np.maximum(1.0, length / size)
    exact = int(min(np.ceil(reach).max() * 2 + 1, max(1, length.max())))
    return -(-exact // multiple) * multiple


def _weighted(
    values: UInt8[Tensor, " n"],
    base: Tensor,
    first: Tensor,
    weights: Iterable[Tensor],
    last: Tensor,
    strides: tuple[int, int],
) -> UInt8[Tensor, "3 *shape"]:
    """Sum over taps of weight * values[base + (first + tap) * step + channel], rounded to a byte.

    `strides` are the steps between positions and between channels. Channels come out as planes: an
    innermost dimension of three is slow on every device.
    """
    step, channel = strides
    planes = torch.arange(3, device=values.device, dtype=base.dtype) * channel
    planes = planes.view(3, *(1 for _ in first.shape))
    total: Tensor | None = None
    for tap, weight in enumerate(weights):
        # A tap outside the picture has no weight; it only must not read outside the buffer.
        place = base + torch.minimum((first + tap).clamp_(min=0), last) * step
        index = place[None] + planes
        fetched = values.index_select(0, index.flatten()).view(index.shape).float()
        total = fetched * weight if total is None else total.addcmul_(fetched, weight)
    assert total is not None
    return total.add_(0.5).clamp_(0, 255).to(torch.uint8)


def resize_columns(
    values: UInt8[Tensor, " n"], base: Tensor, first: Tensor, weights: Tensor, last: Tensor, owner: Tensor
) -> UInt8[Tensor, "3 R size"]:
    """Row r of the result: row r of the list (which belongs to picture owner[r]), resized sideways."""
    each = (weight[owner] for weight in weights.unbind(-1))
    return _weighted(values, base[:, None], first[owner], each, last[owner][:, None], (3, 1))


def resize_rows(
    columns: UInt8[Tensor, "3 R size"], base: Tensor, first: Tensor, weights: Tensor, last: Tensor
) -> UInt8[Tensor, "B 3 size size"]:
    """The pictures, out of the list of rows that `resize_columns` made."""
    rows, size = columns.shape[1:]
    column = torch.arange(size, device=columns.device, dtype=base.dtype)
    out = _weighted(
        columns.reshape(-1),
        base[:, None, None] * size + column,
        first[:, :, None],
        (weight[:, :, None] for weight in weights.unbind(-1)),
        last[:, None, None],
        (size, size * rows),
    )
    return out.transpose(0, 1).contiguous()


@functools.cache
def _passes(compile: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor], int]:
    """The two passes and what tap counts are rounded up to: compiled, each count is a program of its own."""
    if compile == "none":
        return resize_columns, resize_rows, 1
    return torch.compile(resize_columns, dynamic=True), torch.compile(resize_rows, dynamic=True), 4


def copy_boxes(pixels: UInt8[Tensor, "n 3"], places: Places, size: int) -> UInt8[Tensor, "B 3 size size"]:
    """Boxes that already have the wanted size: one gather, nothing to weigh."""
    span = np.arange(size)
    rows = places.box[:, :1] + span
    columns = places.box[:, 1:2] + np.where(places.flip[:, None], span[::-1], span)
    height, width = places.size[:, :1], places.size[:, 1:]
    there_y, there_x = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    first = places.offset[:, None] + np.where(there_y, rows, 0) * places.pitch[:, None]
    device = pixels.device
    index = to_device(first, device)[:, :, None] + to_device(np.where(there_x, columns, 0), device)[:, None]
    inside = to_device(there_y, device)[:, :, None] & to_device(there_x, device)[:, None]
    planes = pixels.index_select(0, index.flatten()).view(-1, size, size, 3).permute(0, 3, 1, 2)
    return planes.contiguous().mul_(inside[:, None])


def resize_boxes(
    pixels: UInt8[Tensor, "n 3"], places: Places, size: int, compile: str = "none"
) -> UInt8[Tensor, "B 3 size size"]:
    """Every box of `places`, resized to size x size with antialiasing, mirrored where asked.

    Within one level of Pillow's crop and resize: both round once after the columns and once after
    the rows. `compile="inductor"` makes one kernel of each pass, for a GPU.
    """
    if (places.box[:, 2:] == size).all():
        return copy_boxes(pixels, places, size)
    device = pixels.device
    sideways, upright, multiple = _passes(compile)
    top, left, box_h, box_w = (places.box[:, i] for i in range(4))
    height, width = places.size[:, 0], places.size[:, 1]
    row_low, row_high = np.clip(top, 0, height - 1), np.clip(top + box_h, 1, height)
    rows = row_high - row_low
    largest = max(pixels.numel(), 3 * size * int(rows.sum()))
    # 32-bit indices halve the traffic, wherever they reach far enough.
    integer = torch.int32 if largest < 2**31 else torch.int64
    put = functools.partial(to_device, device=device)

    cubic, flip = put(places.cubic), put(places.flip)
    taps = [tap_count(length, places.cubic, size, multiple) for length in (box_w, box_h)]
    x_first, x_weight = tap_tables(put(left), put(box_w), put(width), cubic, flip, size, taps[0])
    y_first, y_weight = tap_tables(put(top), put(box_h), put(height), cubic, flip & False, size, taps[1])
    # First all columns, for just the rows that the boxes touch; the rows of all pictures in one list.
    picture = np.repeat(np.arange(len(rows)), rows)
    start = np.concatenate([[0], np.cumsum(rows)[:-1]])
    row = np.arange(len(picture)) - start[picture] + row_low[picture]
    base = put((places.offset[picture] + row * places.pitch[picture]) * 3).to(integer)
    last = put(width - 1).to(integer)
    columns = sideways(pixels.view(-1), base, x_first.to(integer), x_weight, last, put(picture))
    base, last = put(start - row_low).to(integer), put(row_high - 1).to(integer)
    return upright(columns, base, y_first.to(integer), y_weight, last)


def ragged(pictures: list[np.ndarray]) -> tuple[UInt8[np.ndarray, "n 3"], np.ndarray, np.ndarray]:
    """Lay (h, w, 3) pictures behind one another: (pixels, offset of each, size of each)."""
    sizes = np.array([picture.shape[:2] for picture in pictures], np.int64)
    ends = np.cumsum(sizes[:, 0] * sizes[:, 1])
    offsets = np.concatenate([[0], ends[:-1]])
    flat = np.empty((int(ends[-1]), 3), np.uint8)
    for picture, offset, end in zip(pictures, offsets, ends, strict=True):
        flat[offset:end].reshape(picture.shape)[...] = picture
    return flat, offsets, sizes
