"""Augmentation of a batch after cropping, by a backend: policy, colour jitter, normalisation, erasing, mixing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from fathoms.config_checks import check_ranges, ranged
from fathoms.data.augment.erase_and_mix import (
    MODES,
    Erasing,
    Finish,
    MixOptions,
    Mixture,
    draw_mixture,
    draw_rectangles,
    finish,
    soft_targets,
)
from fathoms.data.augment.per_image import apply_layer
from fathoms.data.augment.policies import (
    Layer,
    draw_jitter,
    draw_layers,
    jitter_ranges,
    jitters_beside,
    parse_policy,
)
from fathoms.data.counter_rng import generators, sample_keys
from fathoms.data.images.crops import FILTERS
from fathoms.data.images.pixels import PixelLayout, resize_boxes
from fathoms.data.sampler import Refs
from fathoms.errors import ConfigError
from fathoms.ops.dispatch import why_not_triton
from fathoms.registry import check_name

IMPLS = ("auto", "torch", "triton")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class AugmentOptions:
    """Augmentation of a training batch, by the names of the flags; the defaults only normalise."""

    aa: str | None = None
    """rand-m9-mstd0.5-inc1 and the like; v0, v0r, original, originalr (AutoAugment); 3a."""
    color_jitter: float | tuple[float, ...] | None = None
    """Strength of brightness, contrast, saturation (and hue); without effect beside a policy other than a `3a`."""
    reprob: float = ranged(0.0, least=0, most=1)
    """Probability of random erasing."""
    remode: str = "const"
    """const, rand (a colour for each rectangle) or pixel (noise)."""
    recount: int = ranged(1, least=1)
    """Largest number of erased rectangles."""
    mix: MixOptions = field(default_factory=MixOptions)
    """Mixup and cutmix."""
    train_interpolation: str = "random"
    """Filter of rotations, shears and translations: random, bilinear or bicubic."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Subtracted, on the scale 0 to 1."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Divided by, on the scale 0 to 1."""

    def __post_init__(self) -> None:
        check_ranges(self, "--")
        check_name(self.remode, MODES, "erasing mode", "--remode")
        if self.aa is not None:
            parse_policy(self.aa)
        if self.color_jitter is not None:
            jitter_ranges(self.color_jitter)
        check_name(self.train_interpolation, FILTERS, "filter", "--train-interpolation")
        if min(self.std) <= 0:
            raise ConfigError(f"--std {self.std}: is not positive; use numbers above zero")


@dataclass(frozen=True)
class Backend:
    """The functions of one backend.

    Both give the same pixels, but for one level where a sum falls between two, and for the pixels on the very border of
    a rotated image.
    """

    name: str
    resize: Callable[[Tensor, PixelLayout, int], Tensor]
    """As `fathoms.data.images.pixels.resize_boxes`."""
    layer: Callable[[Tensor, Layer, Tensor], Tensor]
    """As `fathoms.data.augment.per_image.apply_layer`."""
    finish: Callable[[Tensor, Tensor, Tensor, torch.dtype, Finish], Tensor]
    """As `fathoms.data.augment.erase_and_mix.finish`."""

    def described(self, device: torch.device) -> str:
        """A few words for the log; empty where the workers do everything."""
        policies = "" if self.name == "triton" else ", policies on the CPU"
        return "" if device.type == "cpu" else f"; images on {device} by {self.name}{policies}"


TORCH = Backend("torch", resize_boxes, apply_layer, finish)
"""The reference. It applies policies image by image on the CPU, and does everything else on any device."""


@functools.cache
def choose_backend(impl: str, device: torch.device) -> Backend:
    """Resolve "auto": Triton on a CUDA device, else torch. An explicit choice is obeyed or refused, never swapped."""
    check_name(impl, IMPLS, "backend", "impl")
    reason = why_not_triton(device)
    if impl == "triton" and reason:
        raise ConfigError(f'impl="triton" cannot run: {reason}; use impl="auto"')
    if impl == "triton" or (impl == "auto" and device.type == "cuda" and not reason):
        # Triton is imported here, so that this module loads where it is not installed.
        from fathoms.data.augment import launches

        return Backend("triton", launches.resize_boxes, launches.apply_layer, launches.finish)
    return TORCH


class Augment:
    """Augmentation of whole batches, a function of (seed, epoch, sample) and nothing else.

    Args:
        options: Which augmentations, and how strong.
        seed: Seed of the run.
        classes: Number of classes, for soft targets.
        train: False only normalises.
        dtype: Type of the resulting images.
        device: Device of the batches.
        backend: What changes the pixels, from `choose_backend`; None means torch.
    """

    def __init__(
        self,
        options: AugmentOptions,
        *,
        seed: int = 0,
        classes: int = 0,
        train: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: Backend | None = None,
    ) -> None:
        if train and options.mix.active and classes < 2:
            raise ConfigError(f"classes={classes}: mixup and cutmix need 2 or more")
        self.options, self.seed, self.classes, self.train, self.dtype = options, seed, classes, train, dtype
        self.device = torch.device(device)
        self.backend = backend or TORCH
        self.policy = parse_policy(options.aa) if options.aa and train else None
        jitters = train and options.color_jitter and jitters_beside(options.aa)
        self.ranges = jitter_ranges(options.color_jitter) if jitters and options.color_jitter else None
        mean, std = (torch.tensor(values)[:, None, None] for values in (options.mean, options.std))
        self._scale, self._shift = (1 / (255 * std)).to(self.device), (-mean / std).to(self.device)
        grey = [min(255, round(255 * value)) for value in options.mean]
        # The torch backend fills on the CPU, perhaps in a worker, which must not touch a GPU.
        where = self.device if self.backend.name == "triton" else "cpu"
        self._fill = torch.tensor(grey, dtype=torch.uint8, device=where)

    def colours(self, images: UInt8[Tensor, "B 3 H W"], refs: Refs, epoch: int) -> UInt8[Tensor, "B 3 H W"]:
        """Apply policy and colour jitter to bytes, perhaps in place; returns the batch."""
        for layer in self.draw_layers(refs, epoch):
            images = self.apply_layer(images, layer)
        return images

    def draw_layers(self, refs: Refs, epoch: int) -> list[Layer]:
        """Draw the operations of policy and colour jitter for each sample, on the host alone."""
        layers = []
        if self.policy is not None:
            keys = sample_keys(self.seed, epoch, "policy", refs.index, refs.repeat)
            layers += draw_layers(self.policy, keys, self.options.train_interpolation)
        if self.ranges is not None:
            keys = sample_keys(self.seed, epoch, "jitter", refs.index, refs.repeat)
            layers += draw_jitter(self.ranges, keys)
        return layers

    def apply_layer(self, images: UInt8[Tensor, "B 3 H W"], layer: Layer) -> UInt8[Tensor, "B 3 H W"]:
        """Apply one layer of operations to bytes, perhaps in place; returns the batch."""
        return self.backend.layer(images, layer, self._fill)

    def finish(
        self,
        images: UInt8[Tensor, "B 3 H W"],
        labels: Int64[Tensor, " B"],
        refs: Refs,
        epoch: int,
        batch: int,
        total: int | None = None,
    ) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B C"] | None]:
        """Normalise, erase and mix; also returns soft targets if samples were mixed, else None."""
        height, width = images.shape[2:]
        erasing = self.draw_erasing(refs, epoch, height, width)
        mixture = self.draw_mixture({batch: refs}, epoch, height, width, total)
        return self.apply_finish(images, labels, Finish(erasing, mixture))

    def draw_erasing(self, refs: Refs, epoch: int, height: int, width: int) -> Erasing | None:
        """Draw the rectangles to erase, on the host alone; None if erasing is off."""
        if not self.train or not self.options.reprob:
            return None
        keys = sample_keys(self.seed, epoch, "erase", refs.index, refs.repeat)
        boxes = draw_rectangles(keys, self.options.reprob, self.options.recount, height, width)
        return Erasing(boxes, self.options.remode, keys)

    def draw_mixture(
        self, batches: Mapping[int, Refs], epoch: int, height: int, width: int, total: int | None = None
    ) -> Mixture | None:
        """Draw how the samples of each batch are mixed, on the host alone; None if mixing is off.

        All ranks share the mixture of a batch, which has `total` samples over them; None: these are all.
        """
        if not self.train or not self.options.mix.active:
            return None
        parts = []
        chances = generators(self.seed, epoch, "mix", list(batches))
        for (batch, refs), rng in zip(batches.items(), chances, strict=True):
            count = len(refs) if total is None else total
            drawn = draw_mixture(self.options.mix, rng, count, height, width)
            parts.append(drawn.part(refs.position - batch * count))
        return Mixture.joined(parts)

    def apply_finish(
        self, images: UInt8[Tensor, "B 3 H W"], labels: Int64[Tensor, " B"], drawn: Finish
    ) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B C"] | None]:
        """Normalise, and erase and mix as drawn; also returns soft targets if samples were mixed, else None."""
        out = self.backend.finish(images, self._scale, self._shift, self.dtype, drawn)
        if drawn.mixture is None:
            return out, None
        return out, soft_targets(labels, self.classes, self.options.mix.smoothing, drawn.mixture)
