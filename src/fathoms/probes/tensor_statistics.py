"""Statistics of one activation: size, shape of the tokens, and what a 16-bit format would lose of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Values = dict[str, Tensor]

FLOAT16_MAX = 65504.0
BFLOAT16_TOP = 2.0**120
"""Beyond this a bfloat16 number is within a factor of 256 of its largest."""

SATURATED = 2.0
"""|alpha x| at which tanh has lost 93 % of its slope and erf 98 %."""

# Where each activation has lost its slope: |slope| is below 0.013 beyond, and zero for ReLU.
DEAD_BELOW = {"gelu": -3.0, "relu": 0.0, "silu": -6.0}


def wide(x: Tensor) -> Tensor:
    """A detached copy in float64, or in float32 where the device has no float64."""
    return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)


def precise(x: Tensor) -> Tensor:
    """Detached, in float32 or better: for statistics of every pair of tokens, where float64 would be slow."""
    return x.detach() if x.dtype == torch.float64 else x.detach().float()


def rms(x: Tensor) -> Tensor:
    """Root mean square, summed in float64."""
    return norm(x) / math.sqrt(max(x.numel(), 1))


def norm(x: Tensor) -> Tensor:
    """Euclidean norm of all elements, summed in float64."""
    kind = torch.float32 if x.device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(x.detach(), dtype=kind)


def largest(*tensors: Tensor) -> Tensor:
    """Largest absolute value."""
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
