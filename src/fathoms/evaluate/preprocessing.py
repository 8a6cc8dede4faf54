"""Preprocessing of images for inference: resize, centre crop and normalisation, as in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fathoms.config_checks import check_choices, check_types
from fathoms.data import IMAGENET_MEAN, IMAGENET_STD
from fathoms.errors import ConfigError

FILE_CROP = 0.9
"""Default share of each side of an image file that the centre crop keeps."""


@dataclass(frozen=True)
class Preprocessing:
    """Resize, centre crop, normalise; the defaults are those of a recipe that does not set them.

    Args:
        crop_pct: Share of each side that the crop keeps; None keeps 0.9 of an image file and all of an array.
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
        if not all(value > 0 for value in (self.file_crop, *self.std)):
            raise ConfigError("preprocessing: crop_pct and std must be above zero; correct them")

    @property
    def file_crop(self) -> float:
        """Share of each side of an image file that the crop keeps."""
        return FILE_CROP if self.crop_pct is None else self.crop_pct

    @classmethod
    def of(cls, recipe: Mapping[str, Any], **changes: Any) -> Preprocessing:
        """The preprocessing of a recipe, with the changes that are not None."""
        known = {name: recipe[name] for name in cls.__dataclass_fields__ if recipe.get(name) is not None}
        known |= {name: value for name, value in changes.items() if value is not None}
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)
