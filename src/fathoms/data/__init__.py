"""Data: sources, fast decoding, augmentation on the device, loaders that resume anywhere.

Names are imported when first used, so that a command that needs one of them does not load them all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The public names, by module.
_MODULES = {
    "augment.erase_and_mix": ("MixOptions",),
    "augment.pipeline": ("Augment", "AugmentOptions", "choose_backend"),
    "device_loader": ("DeviceLoader",),
    "images.crops": ("CropOptions",),
    "images.decode": ("choose_decoder",),
    "images.transforms": ("EvalTransform", "ImageTransform", "TrainTransform"),
    "loader": ("Loader", "LoaderOptions"),
    "sampler": ("Batch", "Refs", "Sampler"),
    "sources.arrays": ("ArraySource",),
    "sources.source": ("ArchiveError", "BadImageError", "DataError", "LoaderError", "Source"),
    "sources.splits": ("list_splits", "open_source"),
}
_HOMES = {name: f"fathoms.data.{module}" for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    # The same names for the type checker, which does not run `__getattr__`; a test compares the two.
    from fathoms.data.augment.erase_and_mix import MixOptions as MixOptions
    from fathoms.data.augment.pipeline import Augment as Augment
    from fathoms.data.augment.pipeline import AugmentOptions as AugmentOptions
    from fathoms.data.augment.pipeline import choose_backend as choose_backend
    from fathoms.data.device_loader import DeviceLoader as DeviceLoader
    from fathoms.data.images.crops import CropOptions as CropOptions
    from fathoms.data.images.decode import choose_decoder as choose_decoder
    from fathoms.data.images.transforms import EvalTransform as EvalTransform
    from fathoms.data.images.transforms import ImageTransform as ImageTransform
    from fathoms.data.images.transforms import TrainTransform as TrainTransform
    from fathoms.data.loader import Loader as Loader
    from fathoms.data.loader import LoaderOptions as LoaderOptions
    from fathoms.data.sampler import Batch as Batch
    from fathoms.data.sampler import Refs as Refs
    from fathoms.data.sampler import Sampler as Sampler
    from fathoms.data.sources.arrays import ArraySource as ArraySource
    from fathoms.data.sources.source import ArchiveError as ArchiveError
    from fathoms.data.sources.source import BadImageError as BadImageError
    from fathoms.data.sources.source import DataError as DataError
    from fathoms.data.sources.source import LoaderError as LoaderError
    from fathoms.data.sources.source import Source as Source
    from fathoms.data.sources.splits import list_splits as list_splits
    from fathoms.data.sources.splits import open_source as open_source

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
