"""The last stages of a batch: normalise, random erasing, mixup and cutmix with soft targets.

Erasing is drawn for each sample. Sample i is mixed with sample B - 1 - i, as in timm; the draws of mixing belong to the
batch (epoch, number) and are shared by all ranks.

Papers: Random Erasing, Zhong et al. 2017, arXiv:1708.04896; mixup, Zhang et al. 2017, arXiv:1710.09412; CutMix,
Yun et al. 2019, arXiv:1905.04899.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from fathoms.config_checks import check_ranges, ranged
from fathoms.data.counter_rng import sample_keys, to_device, uniforms
from fathoms.registry import check_name

MODES = ("const", "rand", "pixel")
_TRIES = 10


def draw_rectangles(keys: np.ndarray, prob: float, count: int, height: int, width: int) -> np.ndarray:
    """Draw rectangles (B, count, 4) of top, left, height, width; a height of zero erases nothing.

    An area between 2 % and a third of the image (shared among the rectangles), an aspect between
    0.3 and 1 / 0.3; the first of ten draws that is smaller than the image.
    """
    out = np.zeros((len(keys), count, 4), np.int64)
    gate = uniforms(keys, 2)
    rows = np.flatnonzero(gate[:, 0] < prob)
    number = 1 + np.floor(gate[rows, 1] * count)
    per_box = 2 * _TRIES + 2
    body = uniforms(keys[rows], count * per_box, first=2).reshape(len(rows), count, per_box)
    area = height * width * (0.02 + (1 / 3 - 0.02) * body[..., :_TRIES]) / number[:, None, None]
    reach = math.log(1 / 0.3)
    aspect = np.exp(reach * (2 * body[..., _TRIES : 2 * _TRIES] - 1))
    tall, wide = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
    fits = (tall < height) & (wide < width)
    first = fits.argmax(-1)[..., None]
    tall = np.take_along_axis(tall, first, -1)[..., 0]
    wide = np.take_along_axis(wide, first, -1)[..., 0]
    top = np.floor(body[..., -2] * (height - tall + 1))
    left = np.floor(body[..., -1] * (width - wide + 1))
    used = (np.arange(count) < number[:, None]) & fits.any(-1)
    out[rows] = np.stack([top, left, np.where(used, tall, 0), wide], -1)
    return out


def normal_noise(draws: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Standard normal numbers from uniform ones in steps of 2^-24; all are finite.

    Each step is exact in float32 in this order. Adding the half step before the 1 is taken off would round the
    largest draw up to 1, whose normal is infinite: one pixel in 17 million, so one erased image in a hundred.
    """
    return math.sqrt(2) * torch.erfinv(2 * draws - 1 + 2.0**-24)


def erase(
    images: Float[Tensor, "B C H W"], rectangles: np.ndarray, mode: str, keys: np.ndarray
) -> Float[Tensor, "B C H W"]:
    """Fill the rectangles, in place; samples without one are not touched."""
    rows = np.flatnonzero(rectangles[..., 2].any(-1))
    # Noise has a key of its own; otherwise its first numbers would be those that drew the rectangles.
    own = sample_keys(0, 0, "noise", keys[rows].view(np.int64))
    for row, key in zip(rows.tolist(), own[:, None], strict=True):
        fills = _fills(mode, key, rectangles.shape[1], images[row])
        for fill, (top, left, tall, wide) in zip(fills, rectangles[row].tolist(), strict=True):
            place = (slice(None), slice(top, top + tall), slice(left, left + wide))
            images[row][place] = fill[place]
    return images


def _fills(mode: str, key: np.ndarray, count: int, image: Float[Tensor, "C H W"]) -> Float[Tensor, "n C H W"]:
    """What each of `count` rectangles of an image shows of itself."""
    if mode == "const":
        return torch.zeros_like(image).expand(count, -1, -1, -1)
    shape = (count, len(image), 1, 1) if mode == "rand" else (1, *image.shape)
    # The kernels draw 24 bits, all that float32 can hold without rounding up to one.
    draws = np.floor(uniforms(key, math.prod(shape)) * 2**24) * 2.0**-24
    noise = normal_noise(torch.from_numpy(draws).float()).to(image)
    return noise.view(shape).expand(count, *image.shape)


MIX_MODES = ("batch", "pair", "elem")


@dataclass(frozen=True)
class MixOptions:
    """Mixup and cutmix, by the names of their flags; both alphas at zero mean no mixing."""

    mixup: float = ranged(0.0, least=0)
    """Alpha of the beta distribution of mixup."""
    cutmix: float = ranged(0.0, least=0)
    """Alpha of the beta distribution of cutmix."""
    mixup_prob: float = ranged(1.0, least=0, most=1)
    """Probability of mixing at all."""
    mixup_switch_prob: float = ranged(0.5, least=0, most=1)
    """Probability of cutmix where both are on."""
    mixup_mode: str = "batch"
    """One mixture for the batch, one per pair, or one per sample."""
    smoothing: float = ranged(0.1, least=0, below=1)
    """Label smoothing of the soft targets."""

    def __post_init__(self) -> None:
        check_ranges(self, "--")
        check_name(self.mixup_mode, MIX_MODES, "mixing mode", "--mixup-mode")

    @property
    def active(self) -> bool:
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
        columns = [
            (part.share, part.cut, part.box, part.partner + start)
            for part, start in zip(parts, first, strict=False)
        ]
        return cls(*map(np.concatenate, zip(*columns, strict=True)))


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
    partner, share = to_device([mixture.partner, mixture.share.astype(np.float32)], images.device)
    mixed = images.index_select(0, partner)
    if not mixture.cut.all():
        mixed += (images - mixed).mul_(share.to(images.dtype)[:, None, None, None])
    for row in np.flatnonzero(mixture.cut).tolist():
        top, bottom, left, right = mixture.box[row].tolist()
        mixed[row] = images[row]
        mixed[row, :, top:bottom, left:right] = images[mixture.partner[row], :, top:bottom, left:right]
    return mixed


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


@dataclass(frozen=True)
class Erasing:
    """Rectangles (B, count, 4) of top, left, height and width, the fill mode, and each sample's key."""

    rectangles: np.ndarray
    mode: str
    keys: np.ndarray


@dataclass(frozen=True)
class Finish:
    """The random choices of the last stages of a batch; None skips a stage."""

    erasing: Erasing | None
    mixture: Mixture | None


def finish(
    images: UInt8[Tensor, "B 3 H W"],
    scale: Float[Tensor, "3 1 1"],
    shift: Float[Tensor, "3 1 1"],
    dtype: torch.dtype,
    drawn: Finish,
) -> Float[Tensor, "B 3 H W"]:
    """Normalise, erase and mix: v * scale + shift, which is (v / 255 - mean) / std, is computed in float32."""
    out = torch.addcmul(shift, images, scale).to(dtype)
    if drawn.erasing is not None:
        out = erase(out, drawn.erasing.rectangles, drawn.erasing.mode, drawn.erasing.keys)
    return out if drawn.mixture is None else mix_images(out, drawn.mixture)
