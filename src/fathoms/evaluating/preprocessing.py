"""From an image file to the input of a model: resize, centre crop, normalisation, and the loader that does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from fathoms.config_checks import check_choices, check_types
from fathoms.data import (
    ArraySource,
    Augment,
    AugmentOptions,
    DeviceLoader,
    EvalTransform,
    Loader,
    LoaderOptions,
    Sampler,
    Source,
    choose_backend,
)
from fathoms.errors import ConfigError
from fathoms.models.zoo import IMAGENET, data_config

AnyLoader = Loader | DeviceLoader
WHOLE_UP_TO = 128
"""Image size in pixels up to which the whole image is evaluated by default."""
FILE_CROP = 0.9
"""Default share of each side that the centre crop keeps of larger images."""


def default_crop(image_size: int) -> float:
    """Default share of each side of an image file that the centre crop keeps, by the model's image size.

    Small images come cut to their size: a smaller share would enlarge each of them only to cut its rim off again.
    """
    return 1.0 if image_size <= WHOLE_UP_TO else FILE_CROP


@dataclass(frozen=True)
class Preprocessing:
    """Resize, centre crop, normalise; the defaults are those of a recipe that does not set them.

    Args:
        crop_pct: Share of each side of an image file that the crop keeps; None is the default for the model's image
            size (`default_crop`). Arrays are never cropped.
        interpolation: Filter of the resize.
        mean: Per-channel mean that is subtracted.
        std: Per-channel standard deviation to divide by.
    """

    crop_pct: float | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    mean: tuple[float, float, float] = IMAGENET["mean"]
    std: tuple[float, float, float] = IMAGENET["std"]

    def __post_init__(self) -> None:
        check_types(self, "preprocessing", ConfigError)
        check_choices(self, "preprocessing")
        if not all(value > 0 for value in (1.0 if self.crop_pct is None else self.crop_pct, *self.std)):
            raise ConfigError("preprocessing: crop_pct and std must be above zero; correct them")

    def crop(self, image_size: int) -> float:
        """Share of each side of an image file that the crop keeps, for a model of this image size."""
        return default_crop(image_size) if self.crop_pct is None else self.crop_pct

    def at(self, image_size: int) -> Preprocessing:
        """The same with the crop written out, for a model of this image size."""
        return replace(self, crop_pct=self.crop(image_size))

    def changed(self, **changes: Any) -> Preprocessing:
        """A copy with the changes that are not None."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> Preprocessing:
        """The preprocessing of a recipe, or of a table that was recorded."""
        known = {name: recipe[name] for name in cls.__dataclass_fields__ if recipe.get(name) is not None}
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def described(self, model: str, whole: bool, start: tuple[str, Mapping[str, Any]] = ("", {})) -> str:
        """A line on the preprocessing of a run, on where it comes from, and on how its model's own differs.

        Args:
            model: Its name.
            whole: Whether the data are arrays, which are never cropped.
            start: The weights that it starts from, and the preprocessing that is recorded of them.
        """
        own = data_config(model)
        kept = self.to_dict().keys() - ({"crop_pct"} if whole else set())
        recorded = Preprocessing.of(start[1])
        of_start = sorted(n for n in kept & start[1].keys() if getattr(self, n) == getattr(recorded, n))
        other = {n: own[n] for n in sorted(kept & own.keys()) if getattr(self, n) != own[n]}
        origin = f"as {model} has it" if own and not other else f"{model} has none of its own"
        by = "the recipe or a flag"
        if of_start and (other or not own):
            by = f"{start[0]}, the start" + (f" ({', '.join(of_start)})" if kept - set(of_start) else "")
            origin = f"as recorded by {by}"
        if other:
            differs = ", ".join(f"{name} {_said(value)}" for name, value in other.items())
            first = origin if of_start else f"by {by}"
            origin = f"{first}; {model} itself has {differs}"
        return f"preprocessing: {self}, {origin}"

    def __str__(self) -> str:
        crop = "" if self.crop_pct is None else f", crop_pct {self.crop_pct:g}"
        return f"mean {_said(self.mean)}, std {_said(self.std)}{crop}, {self.interpolation}"

    def assumed(self, checkpoint: str, remedy: str) -> str:
        """A line on a checkpoint that does not record its preprocessing, for which this one is taken."""
        return f"{checkpoint}: does not say how its images are prepared; assumed: {self}; {remedy}"


def _said(value: Any) -> str:
    """A value as a flag takes it."""
    return " ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else str(value)


def check_crop(crop_pct: float | None, source: Source | ArraySource) -> None:
    """Refuse a --crop-pct that would not be used."""
    if isinstance(source, ArraySource) and crop_pct not in (None, 1.0):
        raise ConfigError(f"--crop-pct {crop_pct}: arrays are evaluated whole; leave it out or use 1.0")


def eval_loader(
    source: Source | ArraySource,
    size: int,
    batch_size: int,
    preprocessing: Preprocessing,
    *,
    options: LoaderOptions | None = None,
    device: torch.device | str = "cpu",
    share: tuple[int, int] = (0, 1),
) -> AnyLoader:
    """A loader of every image of a split once, resized, cropped at the centre and normalised.

    Args:
        source: The images.
        size: Side of the images that the model takes.
        batch_size: Images per batch.
        preprocessing: Resize, crop and normalisation; arrays are never cropped.
        options: Workers, limits, and whether images are read as grey; arrays only know the last.
        device: Where batches go.
        share: This rank, and the number of ranks.
    """
    options, (rank, world) = options or LoaderOptions(), share
    sampler = Sampler(len(source), batch_size, order="sequential", world=world, rank=rank)
    backend = choose_backend("auto", torch.device(device))
    normal = AugmentOptions(mean=preprocessing.mean, std=preprocessing.std)
    augment = Augment(normal, train=False, device=device, backend=backend)
    if isinstance(source, ArraySource):
        filter_ = preprocessing.interpolation
        return DeviceLoader(source, sampler, size, None, augment, device, filter_, options.grey)
    transform = EvalTransform(size, preprocessing.crop(size), preprocessing.interpolation)
    return Loader(source, sampler, transform, augment, options, device)
