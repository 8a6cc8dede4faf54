"""Statistics of activations, attention and updates: sizes, likeness of tokens, entropy, what 16 bits would lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fathoms.optimizer_facts import BETAS, EPS, MUON_STRETCH
from fathoms.parts.attention import ClassAttention, SelfAttention

Values = dict[str, Tensor]

FLOAT16_MAX = 65504.0
BFLOAT16_TOP = 2.0**120
"""Beyond this a bfloat16 number is within a factor of 256 of its largest."""

SATURATED = 2.0
"""|alpha x| at which tanh has lost 93 % of its slope and erf 98 %."""

# Where each activation has lost its slope: |slope| is below 0.013 beyond, and zero for ReLU.
DEAD_BELOW = {"gelu": -3.0, "relu": 0.0, "silu": -6.0}


def wide(x: Tensor) -> Tensor:
    """Detached, in float64."""
    return x.detach().double()


def precise(x: Tensor) -> Tensor:
    """Detached, in float32 or better: for statistics of every pair of tokens, where float64 would be slow."""
    return x.detach() if x.dtype == torch.float64 else x.detach().float()


def rms(x: Tensor) -> Tensor:
    """Root mean square, summed in float64."""
    return norm(x) / math.sqrt(max(x.numel(), 1))


def norm(x: Tensor) -> Tensor:
    """Euclidean norm of all elements, summed in float64."""
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float64)


def largest(*tensors: Tensor) -> Tensor:
    return torch.stack([wide(x.detach().abs().max()) for x in tensors]).max()


def tokens_of(x: Tensor) -> Tensor:
    """An activation as (image, token, channel); maps of (B, H, W, C) become rows of tokens."""
    return x.flatten(1, -2) if x.dim() > 3 else x


def token_statistics(stream: Tensor) -> Values:
    """Mean cosine between two tokens of an image, and the share of the energy in the mean over tokens.

    Both are 1 where all tokens of an image are the same.
    """
    x = wide(tokens_of(stream))
    count = x.shape[1]
    energy = x.square().sum()
    share = count * x.mean(1).square().sum() / energy
    if count == 1:
        return {"token_mean": share}
    unit = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    total = unit.sum(1).square().sum(-1)
    return {"token_cosine": ((total - count) / (count * (count - 1))).mean(), "token_mean": share}


def join_statistics(stream: Tensor, added: Tensor, skip: Tensor | None = None) -> Values:
    """Sizes of the stream and of what is added to it, along it and across it, over all tokens.

    Args:
        stream: The stream that enters the residual connection.
        added: What the branch adds.
        skip: What it is added to, where that is a multiple of the stream; None: the stream itself.
    """
    x, f = wide(stream if skip is None else skip), wide(added)
    energy = x.square().sum()
    along = (x * f).sum(-1)
    # A token of zeros has no direction; all that is added to it counts as across.
    parallel = torch.where(along == 0, 0.0, along.square() / x.square().sum(-1)).sum()
    whole = f.square().sum()
    values = {
        "stream": rms(stream),
        "stream_max": largest(stream),
        "added": rms(added),
        "added_max": largest(added),
        "ratio": rms(added) / rms(stream if skip is None else skip),
        "parallel": (parallel / energy).sqrt(),
        "orthogonal": ((whole - parallel).clamp(min=0) / energy).sqrt(),
        "alignment": torch.nn.functional.cosine_similarity(x, f, dim=-1, eps=0.0).nan_to_num().mean(),
    }
    both = torch.stack(
        [beyond(stream, limit) + beyond(added, limit) for limit in (FLOAT16_MAX, BFLOAT16_TOP)]
    )
    shares = both / (stream.numel() + added.numel())
    return values | {"float16": shares[0], "bfloat16": shares[1]}


def beyond(x: Tensor, limit: float) -> Tensor:
    """How many values are beyond a limit or not finite."""
    return wide((~(x.detach().abs() <= limit)).sum())


def dead_share(x: Tensor, kind: str) -> Tensor:
    """Share of hidden units whose activation is flat at every token of the batch; x is what enters it."""
    return wide((x.detach() <= DEAD_BELOW[kind]).flatten(0, -2).all(0)).mean()


def saturated_share(x: Tensor) -> Tensor:
    """Share of values on the flat parts of tanh or erf; x is what enters the function."""
    return wide(x.detach().abs() > SATURATED).mean()


def scale_statistics(scale: Tensor, name: str) -> Values:
    """Mean, smallest and largest absolute value of a learned scale."""
    size = wide(scale).abs()
    return {f"{name}_mean": size.mean(), f"{name}_min": size.min(), f"{name}_max": size.max()}


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
    return attention.mix_logits(fused_logits(q, k)).detach()


def update_norms(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The length of the update that the optimizer's state makes of each parameter, weight decay included.

    It is what the moments of AdamW and LAMB, the momentum of SGD, or Muon's scaled orthogonal step say at the group's
    learning rate, before the next gradient is added. None where the state holds nothing of these parameters, as
    before the first step.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = []
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        length = (
            _length(parameter, state, groups[id(parameter)]) if state and id(parameter) in groups else None
        )
        if length is not None:
            found.append(length)
    return found or None


def _length(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor | None:
    lr = float(group["lr"])
    decay = float(group.get("weight_decay", 0.0))
    if "exp_avg_sq" in state:
        step = _adam(state, group) + decay * wide(parameter)
        if "always_adapt" in group and (decay or group["always_adapt"]):
            # LAMB makes the step as long as the weights are.
            return lr * norm(parameter)
        return lr * norm(step)
    if state.get("momentum_buffer") is None:
        return None
    if group.get("algorithm") == "muon":
        # An orthogonal matrix times the stretch and sqrt(longer side): its length needs no orthogonalisation.
        return torch.full((), lr * MUON_STRETCH * parameter.numel() ** 0.5, dtype=torch.float64).to(
            parameter.device
        )
    return lr * norm(wide(state["momentum_buffer"]) + decay * wide(parameter))


def _adam(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Adam's step at a learning rate of one."""
    count = torch.as_tensor(state.get("step", group.get("step", 1)), dtype=torch.float64).clamp(min=1)
    first, second = (
        1 - torch.tensor(beta, dtype=torch.float64) ** count.cpu() for beta in group.get("betas", BETAS)
    )
    size = (wide(state["exp_avg_sq"]) / float(second)).sqrt() + group.get("eps", EPS)
    return wide(state["exp_avg"]) / float(first) / size
