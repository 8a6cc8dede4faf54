"""Mixup and cutmix with soft targets, for a whole batch, per pair, or per sample.

Sample i is mixed with sample B - 1 - i, as timm does; the draws belong to the step (epoch, step)
over all ranks.

Papers: mixup, Zhang et al. 2017, arXiv:1710.09412; CutMix, Yun et al. 2019, arXiv:1905.04899.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fathoms.data.augment.apply import to_device
from fathoms.errors import ConfigError
from fathoms.registry import check_name

MIX_MODES = ("batch", "pair", "elem")


@dataclass(frozen=True)
class MixOptions:
    """How samples are mixed; both alphas at zero mean no mixing."""

    mixup: float = 0.0
    """Alpha of the beta distribution of mixup."""
    cutmix: float = 0.0
    """Alpha of the beta distribution of cutmix."""
    prob: float = 1.0
    """Probability of mixing at all."""
    switch_prob: float = 0.5
    """Probability of cutmix where both are on."""
    mode: str = "batch"
    """One mixture for the batch, one per pair, or one per sample."""
    smoothing: float = 0.1
    """Label smoothing of the soft targets."""

    def __post_init__(self) -> None:
        check_name(self.mode, MIX_MODES, "mixing mode", "data.mixup_mode")
        if self.mixup < 0 or self.cutmix < 0:
            raise ConfigError(f"data.mixup={self.mixup} and data.cutmix={self.cutmix} must not be negative")
        if not (0 <= self.prob <= 1 and 0 <= self.switch_prob <= 1 and 0 <= self.smoothing < 1):
            raise ConfigError("data: mixup_prob, mixup_switch_prob and smoothing must be between 0 and 1")

    @property
    def active(self) -> bool:
        """Whether anything is mixed."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class Mixture:
    """Per sample: share of its own picture, and the rectangle taken from its partner (cutmix)."""

    share: np.ndarray
    cut: np.ndarray
    box: np.ndarray

    def part(self, places: np.ndarray) -> Mixture:
        """The rows of some samples."""
        return Mixture(self.share[places], self.cut[places], self.box[places])


def draw_mixture(
    options: MixOptions, rng: np.random.Generator, count: int, height: int, width: int
) -> Mixture:
    """Draw lambda and boxes; with cutmix the share is the area that is really left."""
    number = {"batch": 1, "pair": (count + 1) // 2, "elem": count}[options.mode]
    both = options.mixup > 0 and options.cutmix > 0
    cut = rng.random(number) < options.switch_prob if both else np.full(number, options.cutmix > 0)
    smooth = rng.beta(options.mixup or 1.0, options.mixup or 1.0, number)
    share = np.where(cut, rng.beta(options.cutmix or 1.0, options.cutmix or 1.0, number), smooth)
    share = np.where(rng.random(number) < options.prob, share, 1.0)
    ratio = np.sqrt(1 - share)
    tall, wide = (height * ratio).astype(np.int64), (width * ratio).astype(np.int64)
    y, x = rng.integers(0, height, number), rng.integers(0, width, number)
    top, bottom = np.clip(y - tall // 2, 0, height), np.clip(y + (tall + 1) // 2, 0, height)
    left, right = np.clip(x - wide // 2, 0, width), np.clip(x + (wide + 1) // 2, 0, width)
    share = np.where(cut, 1 - (bottom - top) * (right - left) / (height * width), share)
    box = np.stack([top, bottom, left, right], 1)
    if options.mode == "batch":
        pick = np.zeros(count, np.int64)
    else:
        pick = np.arange(count)
        pick = pick if options.mode == "elem" else np.minimum(pick, count - 1 - pick)
    return Mixture(share[pick], cut[pick], box[pick])


def mix_images(images: Float[Tensor, "B C H W"], mixture: Mixture) -> Float[Tensor, "B C H W"]:
    """Mixup: share * x + (1 - share) * partner; cutmix: the partner's pixels inside the box."""
    device, partner = images.device, images.flip(0)
    if not mixture.cut.any():
        share = to_device(mixture.share.astype(np.float32), device).to(images.dtype)[:, None, None, None]
        return partner + share * (images - partner)
    y = torch.arange(images.shape[2], device=device)[:, None]
    x = torch.arange(images.shape[3], device=device)
    box = to_device(mixture.box, device)[:, None, :, None, None]
    inside = (y >= box[:, :, 0]) & (y < box[:, :, 1]) & (x >= box[:, :, 2]) & (x < box[:, :, 3])
    pasted = torch.where(inside, partner, images)
    if mixture.cut.all():
        return pasted
    share = to_device(mixture.share.astype(np.float32), device).to(images.dtype)[:, None, None, None]
    cut = to_device(mixture.cut, device)[:, None, None, None]
    return torch.where(cut, pasted, partner + share * (images - partner))


def soft_targets(
    labels: Int64[Tensor, " B"], classes: int, smoothing: float, mixture: Mixture | None = None
) -> Float[Tensor, "B classes"]:
    """Smoothed one-hot rows, mixed with the partner's where there is a mixture."""
    off = smoothing / classes
    rows = torch.full((len(labels), classes), off, device=labels.device)
    rows.scatter_(1, labels[:, None], 1 - smoothing + off)
    if mixture is None:
        return rows
    share = to_device(mixture.share.astype(np.float32), labels.device)[:, None]
    return rows * share + rows.flip(0) * (1 - share)
