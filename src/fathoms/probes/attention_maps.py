"""Attention over the patches of an image: one map by class attention or rollout, and a map for each head."""

from __future__ import annotations

import math
from typing import Any

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
from fathoms.probes.blocks import find_blocks
from fathoms.probes.recorder import Recorder


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
