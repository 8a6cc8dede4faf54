"""Preprocessing of images for inference: resize, centre crop and normalisation, as in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fathoms.data import IMAGENET_MEAN, IMAGENET_STD
from fathoms.errors import ConfigError
from fathoms.names.config_checks import check_choices, check_types

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
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

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

    @classmethod
    def recorded(cls, recipe: Mapping[str, Any], table: Mapping[str, Any]) -> Preprocessing:
        """The preprocessing of a run or card: its recipe, and above that its table "preprocessing".

        Runs and cards from before that table existed kept 0.9 of every image file, and keep doing so.
        """
        known = {**recipe, **{name: value for name, value in table.items() if value is not None}}
        found = cls.of(known)
        return found.changed(crop_pct=FILE_CROP) if known and found.crop_pct is None else found

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def assumed(self, checkpoint: str, remedy: str) -> str:
        """A line on a checkpoint that does not record its preprocessing, for which this one is taken."""
        return (
            f"{checkpoint}: does not say how its images are prepared; assumed: mean {_numbers(self.mean)}, std "
            f"{_numbers(self.std)}, crop_pct {self.crop_pct}, {self.interpolation}; {remedy}"
        )


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
