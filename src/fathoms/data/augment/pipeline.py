"""All augmentation of a batch that is done after cropping: policy, jitter, normalise, erase, mix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from fathoms.data.augment.erase import check_erasing, draw_rectangles, erase
from fathoms.data.augment.jitter import draw_jitter, jitter_ranges
from fathoms.data.augment.mix import MixOptions, Mixture, draw_mixture, mix_images, soft_targets
from fathoms.data.augment.policy import Layer, draw_layers, parse_policy
from fathoms.data.counter import generators, sample_keys
from fathoms.data.forms import choose_forms
from fathoms.data.plan import Refs
from fathoms.errors import ConfigError

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
    interpolation: str = "random"
    """Filter of rotations, shears and translations."""
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
        if min(self.std) <= 0:
            raise ConfigError(f"data.std={self.std} must be positive")


def normalise(
    images: UInt8[Tensor, "B 3 H W"],
    scale: Float[Tensor, "3 1 1"],
    shift: Float[Tensor, "3 1 1"],
    dtype: torch.dtype,
) -> Float[Tensor, "B 3 H W"]:
    """Pixels v as v * scale + shift, which is (v / 255 - mean) / std, computed in float32."""
    return torch.addcmul(shift, images, scale).to(dtype)


class Augment:
    """Augmentation of whole batches, a function of (seed, epoch, sample) and nothing else.

    Args:
        options: what to do.
        seed: the seed of the run.
        classes: number of classes, for soft targets.
        train: False normalises and does nothing more.
        dtype: type of the images handed out.
        device: where the batches are.
        kernels: who does the operations: "torch", "inductor" (compiled), "triton", or "auto".
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
        kernels: str = "auto",
    ) -> None:
        if train and options.mix.active and classes < 2:
            raise ConfigError(f"data: mixup needs the number of classes; classes={classes}")
        self.options, self.seed, self.classes, self.train, self.dtype = options, seed, classes, train, dtype
        self.device = torch.device(device)
        self.forms = choose_forms(kernels, self.device)
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
            layers += draw_layers(self.policy, keys, self.options.interpolation)
        if self.ranges is not None:
            keys = sample_keys(self.seed, epoch, "jitter", refs.index, refs.repeat)
            layers += draw_jitter(self.ranges, keys)
        return layers

    def apply_layer(self, images: UInt8[Tensor, "B 3 H W"], layer: Layer) -> UInt8[Tensor, "B 3 H W"]:
        """One layer of operations on bytes; the batch may be changed in place, and is returned."""
        return self.forms.layer(images, layer, self._fill)

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
        return self.mix(self.normalised(images, refs, epoch), labels, {step: refs}, epoch, total)

    def normalised(
        self, images: UInt8[Tensor, "B 3 H W"], refs: Refs, epoch: int
    ) -> Float[Tensor, "B 3 H W"]:
        """Normalise and erase: the last steps that belong to one sample."""
        out = normalise(images, self._scale, self._shift, self.dtype)
        if not self.train or not self.options.reprob:
            return out
        keys = sample_keys(self.seed, epoch, "erase", refs.index, refs.repeat)
        boxes = draw_rectangles(keys, self.options.reprob, self.options.recount, *images.shape[2:])
        return erase(out, boxes, self.options.remode, keys)

    def mix(
        self,
        images: Float[Tensor, "B 3 H W"],
        labels: Int64[Tensor, " B"],
        steps: Mapping[int, Refs],
        epoch: int,
        total: int | None = None,
    ) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B C"] | None]:
        """Mix each step's samples among themselves; the second result is soft targets, None if none were mixed.

        Args:
            images: The samples.
            labels: Their classes.
            steps: Which samples they are, step by step.
            epoch: Counter.
            total: Samples of a step over all ranks, which share one mixture; None: these are all.
        """
        if not self.train or not self.options.mix.active:
            return images, None
        parts = []
        chances = generators(self.seed, epoch, "mix", list(steps))
        for (step, refs), rng in zip(steps.items(), chances, strict=True):
            count = len(refs) if total is None else total
            drawn = draw_mixture(self.options.mix, rng, count, *images.shape[2:])
            parts.append(drawn.part(refs.position - step * count))
        mixture = Mixture.joined(parts)
        targets = soft_targets(labels, self.classes, self.options.mix.smoothing, mixture)
        return mix_images(images, mixture), targets
