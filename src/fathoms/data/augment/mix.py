"""Mixup and cutmix with soft targets, for a whole batch, per pair, or per sample.

Sample i is mixed with sample B - 1 - i, as in timm; the draws belong to the batch (epoch, number) and
are shared by all ranks.

Papers: mixup, Zhang et al. 2017, arXiv:1710.09412; CutMix, Yun et al. 2019, arXiv:1905.04899.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fathoms.data.augment.masks import inside_boxes
from fathoms.data.to_device import to_device
from fathoms.errors import ConfigError
from fathoms.names.registry import check_name

MIX_MODES = ("batch", "pair", "elem")


@dataclass(frozen=True)
class MixOptions:
    """Mixup and cutmix, by the names of their flags; both alphas at zero mean no mixing."""

    mixup: float = 0.0
    """Alpha of the beta distribution of mixup."""
    cutmix: float = 0.0
    """Alpha of the beta distribution of cutmix."""
    mixup_prob: float = 1.0
    """Probability of mixing at all."""
    mixup_switch_prob: float = 0.5
    """Probability of cutmix where both are on."""
    mixup_mode: str = "batch"
    """One mixture for the batch, one per pair, or one per sample."""
    smoothing: float = 0.1
    """Label smoothing of the soft targets."""

    def __post_init__(self) -> None:
        check_name(self.mixup_mode, MIX_MODES, "mixing mode", "--mixup-mode")
        for flag, alpha in (("--mixup", self.mixup), ("--cutmix", self.cutmix)):
            if alpha < 0:
                raise ConfigError(f"{flag} {alpha}: is negative; use 0 or more")
        for flag, prob in (
            ("--mixup-prob", self.mixup_prob),
            ("--mixup-switch-prob", self.mixup_switch_prob),
        ):
            if not 0 <= prob <= 1:
                raise ConfigError(f"{flag} {prob}: is not a probability; use 0 to 1")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"--smoothing {self.smoothing}: is out of range; use 0 or more and less than 1")

    @property
    def active(self) -> bool:
        """Whether anything is mixed."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class Mixture:
    """Per sample: the share of its own image, whether it is cutmix and its rectangle, and its partner."""

    share: np.ndarray
    cut: np.ndarray
    box: np.ndarray
    partner: np.ndarray

    def part(self, places: np.ndarray) -> Mixture:
        """The rows at `places`, mixed among themselves: the first with the last."""
        return Mixture(
            self.share[places], self.cut[places], self.box[places], np.arange(len(places))[::-1].copy()
        )

    @classmethod
    def joined(cls, parts: Sequence[Mixture]) -> Mixture:
        """The mixtures of several batches as one; partners stay within their batch."""
        first = np.cumsum([0, *(len(part.share) for part in parts)])
        return cls(
            np.concatenate([part.share for part in parts]),
            np.concatenate([part.cut for part in parts]),
            np.concatenate([part.box for part in parts]),
            np.concatenate([part.partner + start for part, start in zip(parts, first, strict=False)]),
        )


def draw_mixture(
    options: MixOptions, rng: np.random.Generator, count: int, height: int, width: int
) -> Mixture:
    """Draw lambda and boxes; with cutmix the share is the area left after clipping the box."""
    number = {"batch": 1, "pair": (count + 1) // 2, "elem": count}[options.mixup_mode]
    both = options.mixup > 0 and options.cutmix > 0
    cut = rng.random(number) < options.mixup_switch_prob if both else np.full(number, options.cutmix > 0)
    smooth = rng.beta(options.mixup or 1.0, options.mixup or 1.0, number)
    share = np.where(cut, rng.beta(options.cutmix or 1.0, options.cutmix or 1.0, number), smooth)
    share = np.where(rng.random(number) < options.mixup_prob, share, 1.0)
    ratio = np.sqrt(1 - share)
    tall, wide = (height * ratio).astype(np.int64), (width * ratio).astype(np.int64)
    y, x = rng.integers(0, height, number), rng.integers(0, width, number)
    top, bottom = np.clip(y - tall // 2, 0, height), np.clip(y + (tall + 1) // 2, 0, height)
    left, right = np.clip(x - wide // 2, 0, width), np.clip(x + (wide + 1) // 2, 0, width)
    share = np.where(cut, 1 - (bottom - top) * (right - left) / (height * width), share)
    box = np.stack([top, bottom, left, right], 1)
    if options.mixup_mode == "batch":
        pick = np.zeros(count, np.int64)
    else:
        pick = np.arange(count)
        pick = pick if options.mixup_mode == "elem" else np.minimum(pick, count - 1 - pick)
    return Mixture(share[pick], cut[pick], box[pick], np.arange(count)[::-1].copy())


def mix_images(images: Float[Tensor, "B C H W"], mixture: Mixture) -> Float[Tensor, "B C H W"]:
    """Mixup: share * x + (1 - share) * partner; cutmix: the partner's pixels inside the box."""
    # With cutmix the share is that of the area; each pixel is wholly the partner's or its own.
    weight = np.where(mixture.cut, 0, mixture.share).astype(np.float32)
    where, share, cut, box = to_device([mixture.partner, weight, mixture.cut, mixture.box], images.device)
    mixed = images.index_select(0, where)
    if not mixture.cut.all():
        mixed += (images - mixed).mul_(share.to(images.dtype)[:, None, None, None])
    if not mixture.cut.any():
        return mixed
    own = cut[:, None, None] & ~inside_boxes(box, *images.shape[2:])
    return torch.where(own[:, None], images, mixed)


def soft_targets(
    labels: Int64[Tensor, " B"], classes: int, smoothing: float, mixture: Mixture | None = None
) -> Float[Tensor, "B classes"]:
    """Smoothed one-hot rows, mixed with the partner's where there is a mixture."""
    off = smoothing / classes
    rows = torch.full((len(labels), classes), off, device=labels.device)
    rows.scatter_(1, labels[:, None], 1 - smoothing + off)
    if mixture is None:
        return rows
    where, share = to_device([mixture.partner, mixture.share.astype(np.float32)[:, None]], labels.device)
    return rows * share + rows.index_select(0, where) * (1 - share)
