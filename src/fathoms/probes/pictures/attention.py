"""Attention over an image, by head, at a readable size beside the original."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from fathoms.drawing.colours import SOFT, ramp_pixels
from fathoms.drawing.picture import Picture
from fathoms.models.hooks import hooked
from fathoms.models.inference_mode import in_inference
from fathoms.probes.attention_maps import reads_class_token
from fathoms.probes.blocks import find_blocks
from fathoms.probes.recorder import Recorder

SIDE = 132.0
_GAP = 10.0
# Blocks that are drawn, the last of the model.
_BLOCKS = 3


class _Catcher(Recorder):
    """Keeps the logits of each attention instead of its statistics."""

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        super().__init__(model, blocks)
        self.caught: dict[str, Tensor] = {}

    def _attended(self, logits: Tensor) -> None:
        self.caught[self.block] = logits.detach()

    def _joined(
        self, site: tuple[str, str], stream: Tensor, added: Tensor, output: Tensor, skip: Tensor | None = None
    ) -> None:
        """Nothing else is measured."""


@torch.no_grad()
def attention_by_head(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Where the class token looks, or the patches where the head reads those: (heads, grid, grid) for each block.

    Maps sum to one.
    Blocks whose tokens are not a square of patches, such as windows of a part of the image, are left out.
    """
    token = reads_class_token(model)
    catcher = _Catcher(model, find_blocks(model))
    with hooked(*catcher.install()), in_inference(model), catcher.tracer:
        model(image[None])
    return {
        name: found
        for name, logits in catcher.caught.items()
        if len(logits) == 1 and (found := _maps(logits[0].softmax(-1), catcher.prefix, token)) is not None
    }


def _maps(probs: Tensor, prefix: int | None, token: bool) -> Tensor | None:
    """From (heads, queries, keys): the first query if it is a class token that is read, else the patches' mean."""
    queries, keys = probs.shape[-2:]
    grid = math.isqrt(keys)
    if queries == keys and prefix is not None:
        grid = math.isqrt(keys - prefix)
    front = keys - grid * grid
    if probs.dim() != 3 or grid < 2 or (prefix is not None and queries == keys and front != prefix):
        return None
    # Fewer queries than keys are those of class attention.
    first = front and (queries < keys or (queries == keys and token))
    rows = probs[:, 0] if first else probs[:, front if queries == keys else 0 :].mean(1)
    patches = rows[:, front:]
    return (patches / patches.sum(-1, keepdim=True)).unflatten(-1, (grid, grid))


def attention_picture(model: nn.Module, image: Tensor, pixels: np.ndarray) -> Picture | None:
    """The last blocks' attention by head beside the image; None where no block's attention is over the image.

    Args:
        model: The model.
        image: (C, H, W) as the model takes it.
        pixels: The same image as (H, W, 3) bytes, to be shown.
    """
    found = attention_by_head(model, image)
    chosen = dict(list(found.items())[-_BLOCKS:])
    if not chosen:
        return None
    most = max(len(maps) for maps in chosen.values())
    shown = min(most, 8)
    step = SIDE + _GAP
    title = "Attention over the image, by head"
    picture = Picture(16 + (shown + 2) * step, 62 + len(chosen) * (step + 16), title)
    picture.text((16, 22), title, size=14, bold=True)
    picture.text((16, 40), "each map from its lowest (dark) to its highest share (bright)", colour=SOFT)
    for row, (name, maps) in enumerate(chosen.items()):
        y = 66 + row * (step + 16)
        picture.pixels((16, y), (SIDE, SIDE), pixels)
        tiles = {"mean": maps.mean(0)} | {f"head {index}": one for index, one in enumerate(maps[:shown])}
        for column, (label, one) in enumerate(tiles.items(), start=1):
            values = one.cpu().double().numpy()
            x = 16 + column * step
            picture.pixels((x, y), (SIDE, SIDE), ramp_pixels(values, values.min(), values.max()))
            picture.text(
                (x, y - 4),
                label if row or column > 1 else f"{label} of {len(maps)} heads",
                size=10,
                colour=SOFT,
            )
        picture.text((16, y - 4), name, size=10, colour=SOFT)
    picture.data = {name: maps.tolist() for name, maps in chosen.items()}
    return picture


def shown_pixels(image: Tensor) -> np.ndarray:
    """An image as the model takes it, stretched to bytes for a reader: (C, H, W) to (H, W, 3)."""
    x = image.detach().cpu().float()
    x = (x - x.amin()) / (x.amax() - x.amin()).clamp(min=1e-9) * 255
    colours = x[:1].expand(3, -1, -1) if len(x) < 3 else x[:3]
    return colours.permute(1, 2, 0).round().byte().numpy()
