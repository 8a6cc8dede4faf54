"""Attention over the patches of an image: one map by class attention or rollout, and a map for each head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.models.vit import ViT
from fathoms.ops.attention_ops import attention_probabilities
from fathoms.parts.attention import ClassAttention, SelfAttention, TalkingHeadsAttention
from fathoms.parts.modes import hooked, in_inference
from fathoms.parts.readout import READOUTS
from fathoms.plotting.style import INK, PAPER, ramp_pixels
from fathoms.probes.blocks import find_blocks
from fathoms.probes.recorder import Recorder

if TYPE_CHECKING:
    from PIL.Image import Image


def reads_class_token(model: nn.Module) -> bool:
    """Whether the head reads a class token that went through the blocks, and not the patches."""
    if isinstance(model, ViT):
        traits = READOUTS.metadata(model.config.readout)
        return traits.travels and traits.queries
    # timm's models say how they pool; "token" is the class token.
    return getattr(model, "global_pool", "token") == "token"


def _self_map(attention: SelfAttention, x: Tensor, rotation: Any) -> Tensor:
    """Attention probabilities of one block, mean over heads, (B, N, N)."""
    q, k, _ = attention.project(x, rotation)
    probs = attention.probabilities(q, k)
    if isinstance(attention, TalkingHeadsAttention):
        # Mixed rows have negative factors, and need not sum to one.
        mixed = attention.weights(probs).abs()
        probs = mixed / mixed.sum(-1, keepdim=True)
    return probs.mean(1)


def _class_map(attention: ClassAttention, queries: Tensor, context: Tensor) -> Tensor:
    """Attention of the first query to each token of the context, mean over heads, (B, N)."""
    q, k = attention.project(queries, context)
    probs = attention_probabilities(q, k, scale=q.shape[-1] ** -0.5)
    return probs[:, :, 0, queries.shape[1] :].mean(1)


@torch.no_grad()
def attention_maps(model: nn.Module, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B G G"]:
    """Share of the attention on each patch; every map sums to one.

    CaiT's class attention gives it directly. Elsewhere the maps of the blocks, each averaged with the identity
    for the residual connection, are multiplied from the first block to the last.

    Paper: Abnar & Zuidema 2020, arXiv:2005.00928 (rollout).
    """
    if not isinstance(model, ViT):
        raise FathomsError(
            f"attention maps are drawn of fathoms models only, not of {type(model).__name__}; leave --attention out"
        )
    blocks: list[Tensor] = []
    reads: list[Tensor] = []

    def keep(module: Any, inputs: Any) -> None:
        if isinstance(module, ClassAttention):
            reads.append(_class_map(module, *inputs))
        else:
            blocks.append(_self_map(module, inputs[0], inputs[1] if len(inputs) > 1 else None))

    kinds = (ClassAttention, SelfAttention)
    handles = [m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, kinds)]
    with hooked(*handles), in_inference(model):
        model(images)
    if reads:
        maps = torch.stack(reads).mean(0)
    elif blocks:
        maps = _rollout(blocks, model)
    else:
        raise FathomsError("--attention: this model has no attention that can be drawn; leave it out")
    maps = maps / maps.sum(-1, keepdim=True)
    return maps.unflatten(1, (model.grid, model.grid))


def _rollout(blocks: list[Tensor], model: ViT) -> Tensor:
    flow = torch.eye(blocks[-1].shape[-1]).to(blocks[0])[None]
    for block in blocks:
        # Before a class token joins, its place in front attends to itself alone.
        late = flow.shape[-1] - block.shape[-1]
        block = F.pad(block, (late, 0, late, 0))
        block[:, range(late), range(late)] = 1.0
        flow = (block + torch.eye(block.shape[-1]).to(block)) / 2 @ flow
    prefix = model.num_prefix_tokens
    rows = flow[:, 0] if reads_class_token(model) else flow[:, prefix:].mean(1)
    return rows[:, prefix:]


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


def shown_pixels(image: Tensor) -> np.ndarray:
    """An image as the model takes it, stretched to bytes for a reader: (C, H, W) to (H, W, 3)."""
    x = image.detach().cpu().float()
    x = (x - x.amin()) / (x.amax() - x.amin()).clamp(min=1e-9) * 255
    colours = x[:1].expand(3, -1, -1) if len(x) < 3 else x[:3]
    return colours.permute(1, 2, 0).round().byte().numpy()


SIDE = 448
"""Pixels of each of the two images at least."""
GAP, SCALE, BAR, CAPTION = 16, 120, 18, 30


def draw_attention(
    pixels: Float[Tensor, "3 h w"], attention: Float[Tensor, "G G"], caption: str = "image"
) -> Image:
    """The image beside itself under its attention map, both enlarged, with a scale of the shares.

    Args:
        pixels: The model's input before normalisation, from 0 to 1.
        attention: Share of the attention on each patch.
        caption: Text below the image, such as its class.
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
    for place, (image, text) in enumerate(((plain, caption), (mapped, "attention"))):
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
