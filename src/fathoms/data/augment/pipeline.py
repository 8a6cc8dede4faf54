"""All augmentation of a batch that is done after cropping: policy, jitter, normalise, erase, mix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from fathoms.data.augment.backend import AugmentBackend, torch_backend
from fathoms.data.augment.erase import check_erasing, draw_rectangles
from fathoms.data.augment.finish import Erasing, Finish
from fathoms.data.augment.jitter import draw_jitter, jitter_ranges
from fathoms.data.augment.mix import MixOptions, Mixture, draw_mixture, soft_targets
from fathoms.data.augment.policy import Layer, draw_layers, parse_policy
from fathoms.data.counter_rng import generators, sample_keys
from fathoms.data.sampler import Refs
from fathoms.errors import ConfigError
from fathoms.registry import check_name

FILTERS = ("random", "bilinear", "bicubic")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class AugmentOptions:
    """What happens to a training batch; the defaults only normalise."""

    aa: str | None = None
    """rand-m9-mstd0.5-inc1 and the like; v0, v0r, original, originalr (AutoAugment); 3a."""
    color_jitter: float | tuple[float, ...] | None = None
    """Strength of brightness, contrast, saturation (and hue)."""
    reprob: float = 0.0
    """Probability of random erasing."""
    remode: str = "const"
    """const, rand (one colour) or pixel (noise)."""
    recount: int = 1
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
        check_erasing(self.reprob, self.remode, self.recount)
        if self.aa is not None:
            parse_policy(self.aa)
        if self.color_jitter is not None:
            jitter_ranges(self.color_jitter)
        check_name(self.train_interpolation, FILTERS, "filter", "--train-interpolation")
        if min(self.std) <= 0:
            raise ConfigError(f"--std {self.std}: is not positive; use numbers above zero")


class Augment:
    """Augmentation of whole batches, a function of (seed, epoch, sample) and nothing else.

    Args:
        options: what to do.
        seed: the seed of the run.
        classes: number of classes, for soft targets.
        train: False normalises and does nothing more.
        dtype: type of the images handed out.
        device: where the batches are.
        backend: what changes the pixels, from `fathoms.data.device.backend.choose_backend`; None means torch.
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
        backend: AugmentBackend | None = None,
    ) -> None:
        if train and options.mix.active and classes < 2:
            raise ConfigError(
                f"classes={classes}: mixup and cutmix need the number of classes; give 2 or more"
            )
        self.options, self.seed, self.classes, self.train, self.dtype = options, seed, classes, train, dtype
        self.device = torch.device(device)
        self.backend = torch_backend(self.device) if backend is None else backend
        self.policy = parse_policy(options.aa) if options.aa and train else None
        self.ranges = jitter_ranges(options.color_jitter) if options.color_jitter and train else None
        mean, std = (torch.tensor(values)[:, None, None] for values in (options.mean, options.std))
        self._scale, self._shift = (1 / (255 * std)).to(self.device), (-mean / std).to(self.device)
        grey = [min(255, round(255 * value)) for value in options.mean]
        self._fill = torch.tensor(grey, dtype=torch.uint8, device=self.device)

    def colours(self, images: UInt8[Tensor, "B 3 H W"], refs: Refs, epoch: int) -> UInt8[Tensor, "B 3 H W"]:
        """Policy and colour jitter on bytes; the batch may be changed in place, and is returned."""
        for layer in self.draw_layers(refs, epoch):
            images = self.apply_layer(images, layer)
        return images

    def draw_layers(self, refs: Refs, epoch: int) -> list[Layer]:
        """The operations of policy and colour jitter on each sample; nothing is asked of the device."""
        layers = []
        if self.policy is not None:
            keys = sample_keys(self.seed, epoch, "policy", refs.index, refs.repeat)
            layers += draw_layers(self.policy, keys, self.options.train_interpolation)
        if self.ranges is not None:
            keys = sample_keys(self.seed, epoch, "jitter", refs.index, refs.repeat)
            layers += draw_jitter(self.ranges, keys)
        return layers

    def apply_layer(self, images: UInt8[Tensor, "B 3 H W"], layer: Layer) -> UInt8[Tensor, "B 3 H W"]:
        """One layer of operations on bytes; the batch may be changed in place, and is returned."""
        return self.backend.layer(images, layer, self._fill)

    def finish(
        self,
        images: UInt8[Tensor, "B 3 H W"],
        labels: Int64[Tensor, " B"],
        refs: Refs,
        epoch: int,
        step: int,
        total: int | None = None,
    ) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B C"] | None]:
        """Normalise, erase and mix; the second result is soft targets where samples were mixed."""
        height, width = images.shape[2:]
        erasing = self.draw_erasing(refs, epoch, height, width)
        mixture = self.draw_mixture({step: refs}, epoch, height, width, total)
        return self.apply_finish(images, labels, Finish(erasing, mixture))

    def draw_erasing(self, refs: Refs, epoch: int, height: int, width: int) -> Erasing | None:
        """The rectangles that are erased; None if there can be none. Nothing is asked of the device."""
        if not self.train or not self.options.reprob:
            return None
        keys = sample_keys(self.seed, epoch, "erase", refs.index, refs.repeat)
        boxes = draw_rectangles(keys, self.options.reprob, self.options.recount, height, width)
        return Erasing(boxes, self.options.remode, keys)

    def draw_mixture(
        self, steps: Mapping[int, Refs], epoch: int, height: int, width: int, total: int | None = None
    ) -> Mixture | None:
        """How each step's samples are mixed among themselves; None if none are. Nothing is asked of the device.

        Args:
            steps: Which samples they are, step by step.
            epoch: Counter.
            height: Of the pictures.
            width: Of the pictures.
            total: Samples of a step over all ranks, which share one mixture; None: these are all.
        """
        if not self.train or not self.options.mix.active:
            return None
        parts = []
        chances = generators(self.seed, epoch, "mix", list(steps))
        for (step, refs), rng in zip(steps.items(), chances, strict=True):
            count = len(refs) if total is None else total
            drawn = draw_mixture(self.options.mix, rng, count, height, width)
            parts.append(drawn.part(refs.position - step * count))
        return Mixture.joined(parts)

    def apply_finish(
        self, images: UInt8[Tensor, "B 3 H W"], labels: Int64[Tensor, " B"], drawn: Finish
    ) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B C"] | None]:
        """Normalise, and erase and mix as drawn; the second result is soft targets where samples were mixed."""
        out = self.backend.finish(images, self._scale, self._shift, self.dtype, drawn)
        if drawn.mixture is None:
            return out, None
        return out, soft_targets(labels, self.classes, self.options.mix.smoothing, drawn.mixture)
