"""Saturation, hue, sharpness and blur with Pillow's results: operations that need more than one value of a pixel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from fathoms.data.augment.lookup_tables import cut, luma

Images = UInt8[Tensor, "B 3 H W"]
Factor = Float[Tensor, " B"]

# Added before rounding down in hue and blur, not to be mixed up with `CUT_MARGIN`: these numbers are rounded on the way
# to the result, so it must be less than any true fraction there, and float32 is off by less.
ROUND_MARGIN = 1e-4
# Pixels on either side that the box of a blur can reach.
REACH = 3


def colour(images: Images, factor: Factor) -> Images:
    """Saturation: g + factor * (v - g), with g the luma of the pixel: 0 is grey, 1 no change."""
    shades = luma(*images.unbind(1))[:, None]
    return cut((images - shades).mul_(factor[:, None, None, None]).add_(shades))


def sharpness(images: Images, factor: Factor) -> Images:
    """Blend with a smoothed copy: s + factor * (v - s), with s a 3 x 3 smoothing; the outermost pixels stay."""
    values = images.to(torch.int16)
    # The kernel is 1 everywhere and 5 in the middle, over 13: a sum of threes each way plus 4 v.
    rows = values[:, :, :-2] + values[:, :, 1:-1]
    rows += values[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1]
    total += rows[..., 2:]
    middle = values[:, :, 1:-1, 1:-1]
    total += 4 * middle
    smooth = total.float().add_(6.5).div_(13).floor_()
    out = images.clone()
    out[:, :, 1:-1, 1:-1] = cut(torch.addcmul(smooth, factor[:, None, None, None], middle - smooth))
    return out


def _box_kernel(radius: Float[Tensor, " B"], reach: int) -> Float[Tensor, "B k"]:
    """Weights of a box of fractional radius r: 1 / (2r + 1) inside, the rest shared by the two ends."""
    whole = radius.floor()
    weight = 1 / (2 * radius + 1)
    end = (1 - (2 * whole + 1) * weight) / 2
    place = torch.arange(-reach, reach + 1, device=radius.device).abs()[None]
    kernel = torch.where(place <= whole[:, None], weight[:, None], 0.0)
    return torch.where(place == whole[:, None] + 1, end[:, None], kernel)


def blur_boxes(factor: Factor) -> Float[Tensor, "B k"]:
    """Weights of the box that, applied three times, blurs with standard deviation `factor`, at most 2.5."""
    variance = (factor / 3 * factor).double()
    length = (12 * variance + 1).sqrt()
    whole = ((length - 1) / 2).floor()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    return _box_kernel((whole + part).float(), REACH)


def gaussian_blur(images: Images, factor: Factor) -> Images:
    """Blur with standard deviation `factor`: three box blurs each way, rounded after each, as Pillow's.

    The deviation may be up to 2.5 pixels; the box then reaches two pixels to either side.
    """
    kernel, reach = blur_boxes(factor), REACH
    values = images.float()
    for dim, pad in ((3, (reach, reach, 0, 0)), (2, (0, 0, reach, reach))):
        size = values.shape[dim]
        for _ in range(3):
            padded = F.pad(values, pad, mode="replicate")
            parts = [
                padded.narrow(dim, tap, size) * kernel[:, tap, None, None, None]
                for tap in range(2 * reach + 1)
            ]
            values = (sum(parts[1:], parts[0]) + 0.5 + ROUND_MARGIN).floor()
    return values.clamp(0, 255).to(torch.uint8)


def hue(images: Images, factor: Factor) -> Images:
    """Rotate the hue by `factor` of a full circle (-0.5 to 0.5); hue and saturation rounded to bytes."""
    red, green, blue = images.float().unbind(1)
    high, low = images.amax(1).float(), images.amin(1).float()
    span = high - low
    safe = span.clamp(min=1)
    toward_red, toward_green, toward_blue = ((high - c) / safe for c in (red, green, blue))
    angle = torch.where(
        red == high,
        toward_blue - toward_green,
        torch.where(green == high, 2 + toward_red - toward_blue, 4 + toward_green - toward_red),
    )
    turns = torch.where(span > 0, (angle / 6 + 1) % 1.0, 0.0)
    # Pillow keeps hue and saturation in a byte each, and so must we to end at the same colours.
    hue_byte = (turns * 255 + ROUND_MARGIN).floor()
    shift = (factor * 255).to(torch.int32).float()[:, None, None]
    hue_byte = (hue_byte + shift) % 256
    saturation = torch.where(high > 0, (span * 255 / high.clamp(min=1) + ROUND_MARGIN).floor(), 0.0) / 255
    sector = hue_byte * (6 / 255)
    index = sector.floor()
    fraction = sector - index
    down = (high * (1 - saturation)).round()
    falling = (high * (1 - saturation * fraction)).round()
    rising = (high * (1 - saturation * (1 - fraction))).round()
    which = (index.long() % 6)[:, None]
    table = torch.stack([high, falling, down, down, rising, high], 1)
    # Around the circle each channel takes the same six values, two sectors apart.
    picked = [table.gather(1, (which + turn) % 6) for turn in (0, 4, 2)]
    return cut(torch.cat(picked, 1))
