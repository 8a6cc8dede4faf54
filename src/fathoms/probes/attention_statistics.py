"""Statistics of one attention: entropy, largest logit, mean distance, of any softmax or fused attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fathoms.ops.talking_heads import mix_heads
from fathoms.parts.attentions.attention import ClassAttention, SelfAttention
from fathoms.probes.tensor_statistics import Values, precise

MASKED = -64.0
"""Logarithm of an attention weight below which its key counts as masked; Swin's masks add -100 instead of infinity."""


def attention_statistics(logits: Tensor, prefix: int | None = None) -> Values:
    """Entropy over log N (1 is uniform, 0 is one token), largest |logit|, mean distance in patches.

    Each is over every query, head and image; the logit over keys that are not masked, and the distance over
    patches that look at patches.

    Args:
        logits: What the softmax takes, (…, queries, keys).
        prefix: Tokens in front of the patches; None where it is to be told from their number.
    """
    logits = precise(logits)
    logs = logits.log_softmax(-1)
    # A masked key has a weight of zero, whose p log p is zero.
    entropy = -torch.where(logs == -math.inf, 0.0, logs.exp() * logs).sum(-1).mean()
    keys = logits.shape[-1]
    seen = logits.masked_fill(logs < MASKED, 0.0)
    values = {"logit": seen.abs().max()}
    if keys > 1:
        values["entropy"] = entropy / math.log(keys)
    distance = mean_distance(logs.exp(), prefix)
    return values if distance is None else values | {"distance": distance}


def mean_distance(probs: Tensor, prefix: int | None = None) -> Tensor | None:
    """Mean distance, in patches, between a patch and the patches it looks at; None where there is no square grid."""
    queries, keys = probs.shape[-2:]
    grid = math.isqrt(keys if prefix is None else max(keys - prefix, 0))
    prefix = keys - grid * grid if prefix is None else prefix
    if queries != keys or grid < 2 or grid * grid + prefix != keys:
        return None
    patches = probs[..., prefix:, prefix:]
    side = torch.arange(grid, dtype=probs.dtype, device=probs.device)
    places = torch.cartesian_prod(side, side)
    weights = patches / patches.sum(-1, keepdim=True)
    return (weights * torch.cdist(places, places)).sum(-1).mean()


def fused_logits(q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """The logits inside torch's fused attention."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    logits = precise(q) @ precise(k).mT * scale
    if mask is None:
        return logits
    return logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + precise(mask)


def multihead_logits(query: Tensor, key: Tensor, heads: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits inside torch's `multi_head_attention_forward`, whose tokens come as (N, B, D)."""
    dim = query.shape[-1]
    sides = []
    for place, x in enumerate((query, key)):
        rows = slice(place * dim, (place + 1) * dim)
        own = None if bias is None else precise(bias[rows])
        projected = torch.nn.functional.linear(precise(x), precise(weight[rows]), own)
        sides.append(projected.transpose(0, 1).unflatten(-1, (heads, -1)).transpose(1, 2))
    return fused_logits(sides[0], sides[1])


def own_logits(attention: SelfAttention | ClassAttention, inputs: tuple[Any, ...]) -> Tensor:
    """The logits inside one of fathoms' attentions, whose kernels do not show them."""
    if isinstance(attention, ClassAttention):
        return fused_logits(*attention.project(*inputs))
    q, k, _ = attention.project(inputs[0], inputs[1] if len(inputs) > 1 else None)
    logits = fused_logits(q, k)
    weight, bias = attention.logit_mixer()
    return logits if weight is None else mix_heads(logits, weight, bias).detach()
