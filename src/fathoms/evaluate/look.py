"""How a picture becomes what a model was trained to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fathoms.data import IMAGENET_MEAN, IMAGENET_STD
from fathoms.errors import ConfigError
from fathoms.registry import check_name

Colours = tuple[float, float, float]


@dataclass(frozen=True)
class Look:
    """Resize, crop in the middle, normalise; the defaults are those of a recipe that does not say.

    Args:
        crop_pct: Share of the picture that is kept.
        interpolation: Filter of the resize.
        mean: Subtracted from the colours.
        std: What they are divided by.
    """

    crop_pct: float = 0.9
    interpolation: str = "bicubic"
    mean: Colours = IMAGENET_MEAN
    std: Colours = IMAGENET_STD

    def __post_init__(self) -> None:
        numbers = (self.crop_pct, *self.mean, *self.std)
        if not all(isinstance(number, int | float) for number in numbers) or len(numbers) != 7:
            raise ConfigError("preprocessing: crop_pct is a number, mean and std are three each")
        check_name(self.interpolation, ("bilinear", "bicubic"), "filter", "preprocessing")
        if not self.crop_pct > 0 or not all(deviation > 0 for deviation in self.std):
            raise ConfigError("preprocessing: crop_pct and std must be above zero; mend them")

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
