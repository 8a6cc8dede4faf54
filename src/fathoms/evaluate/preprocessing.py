"""How a picture becomes what a model was trained to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fathoms.config_checks import check_choices, check_types
from fathoms.data import IMAGENET_MEAN, IMAGENET_STD
from fathoms.errors import ConfigError
from fathoms.evaluate.loader import PHOTO_CROP


@dataclass(frozen=True)
class Look:
    """Resize, crop in the middle, normalise; the defaults are those of a recipe that does not say.

    Args:
        crop_pct: Share of the picture that is kept; None is 0.9 of a photo and all of an array.
        interpolation: Filter of the resize.
        mean: Subtracted from the colours.
        std: What they are divided by.
    """

    crop_pct: float | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        check_types(self, "preprocessing", ConfigError)
        check_choices(self, "preprocessing")
        if not all(value > 0 for value in (self.photo_crop, *self.std)):
            raise ConfigError("preprocessing: crop_pct and std must be above zero; mend them")

    @property
    def photo_crop(self) -> float:
        """Share of a photo that is kept."""
        return PHOTO_CROP if self.crop_pct is None else self.crop_pct

    @classmethod
    def of(cls, recipe: Mapping[str, Any], **changes: Any) -> Look:
        """What a recipe says, with the changes that are not None."""
        known = {name: recipe[name] for name in cls.__dataclass_fields__ if recipe.get(name) is not None}
        known |= {name: value for name, value in changes.items() if value is not None}
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)
