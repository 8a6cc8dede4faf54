"""An attention map as an image to look at: the original, the map over it, and a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fathoms.drawing.colours import INK, PAPER, ramp_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 448
"""Pixels of each of the two images at least."""
GAP, SCALE, BAR, CAPTION = 16, 120, 18, 30


def draw_attention(pixels: Float[Tensor, "3 h w"], attention: Float[Tensor, "G G"]) -> Image:
    """The image beside itself under its attention map, both enlarged, with a scale of the shares.

    Args:
        pixels: The model's input before normalisation, from 0 to 1.
        attention: Share of the attention on each patch.
    """
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFont

    height, width = pixels.shape[-2:]
    # Whole multiples keep small images sharp.
    times = max(1, -(-SIDE // max(height, width)))
    size = (times * width, times * height)
    bytes_ = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
    plain = Pillow.fromarray(bytes_).resize(size, Pillow.Resampling.BICUBIC)
    most = max(float(attention.max()), 1e-12)
    light = torch.nn.functional.interpolate(
        (attention / most)[None, None].float(), size[::-1], mode="bicubic", align_corners=False
    )
    colours = Pillow.fromarray(ramp_pixels(light[0, 0].numpy(), 0.0, 1.0))
    mapped = Pillow.blend(plain.convert("L").convert("RGB"), colours, 0.6)
    sheet = Pillow.new("RGB", (2 * size[0] + 3 * GAP + SCALE, size[1] + CAPTION + GAP), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for place, (image, text) in enumerate(((plain, "image"), (mapped, "attention"))):
        left = GAP + place * (size[0] + GAP)
        sheet.paste(image, (left, GAP))
        draw.text((left, GAP + size[1] + 7), text, INK, font)
    left = 2 * size[0] + 3 * GAP
    ramp = ramp_pixels(np.linspace(1, 0, size[1])[:, None].repeat(BAR, 1), 0.0, 1.0)
    sheet.paste(Pillow.fromarray(ramp), (left, GAP))
    even = 1 / attention.numel()
    top, bottom = GAP - 4, GAP + size[1] - 14
    # The label of the even share keeps clear of those at the ends.
    labels = [(most, f"{100 * most:.2f} %", 0), (0.0, "0 %", 0), (even, f"{100 * even:.2f} % if even", 20)]
    for share, text, clear in labels:
        down = GAP + (1 - min(share / most, 1.0)) * (size[1] - 1)
        draw.line((left + BAR, down, left + BAR + 5, down), INK)
        place = min(max(down - 9, top + clear), bottom - clear)
        draw.text((left + BAR + 9, place), text, INK, font)
    draw.text((left, GAP + size[1] + 7), "share of a patch", INK, font)
    return sheet
