"""Data: sources, fast decoding, augmentation on the device, loaders that resume anywhere.

Names are imported when first used, so that a command that needs one of them does not load them all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The public names, by module.
_MODULES = {
    "augment.mix": ("MixOptions", "soft_targets"),
    "augment.pipeline": ("IMAGENET_MEAN", "IMAGENET_STD", "Augment", "AugmentOptions"),
    "batch": ("Batch",),
    "crop.image_transform": ("ImageTransform",),
    "crop.random_crop": ("CropOptions",),
    "crop.transforms": ("EvalTransform", "TrainTransform"),
    "decode.decode": ("Decoder", "choose_decoder"),
    "device.backend": ("choose_backend",),
    "device_loader": ("DeviceLoader",),
    "errors": ("ArchiveError", "BadImageError", "DataError", "LoaderError"),
    "loader": ("Loader", "LoaderOptions"),
    "sampler": ("Refs", "Sampler"),
    "sources.arrays": ("ArraySource",),
    "sources.base": ("Source",),
    "sources.detect": ("list_splits", "open_source"),
    "stats": ("LoaderStats",),
    "tools.manifest": ("verify_manifest",),
}
_HOMES = {name: f"fathoms.data.{module}" for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    # The same names for the type checker, which does not run `__getattr__`; a test compares the two.
    from fathoms.data.augment.mix import MixOptions as MixOptions
    from fathoms.data.augment.mix import soft_targets as soft_targets
    from fathoms.data.augment.pipeline import IMAGENET_MEAN as IMAGENET_MEAN
    from fathoms.data.augment.pipeline import IMAGENET_STD as IMAGENET_STD
    from fathoms.data.augment.pipeline import Augment as Augment
    from fathoms.data.augment.pipeline import AugmentOptions as AugmentOptions
    from fathoms.data.batch import Batch as Batch
    from fathoms.data.crop.image_transform import ImageTransform as ImageTransform
    from fathoms.data.crop.random_crop import CropOptions as CropOptions
    from fathoms.data.crop.transforms import EvalTransform as EvalTransform
    from fathoms.data.crop.transforms import TrainTransform as TrainTransform
    from fathoms.data.decode.decode import Decoder as Decoder
    from fathoms.data.decode.decode import choose_decoder as choose_decoder
    from fathoms.data.device.backend import choose_backend as choose_backend
    from fathoms.data.device_loader import DeviceLoader as DeviceLoader
    from fathoms.data.errors import ArchiveError as ArchiveError
    from fathoms.data.errors import BadImageError as BadImageError
    from fathoms.data.errors import DataError as DataError
    from fathoms.data.errors import LoaderError as LoaderError
    from fathoms.data.loader import Loader as Loader
    from fathoms.data.loader import LoaderOptions as LoaderOptions
    from fathoms.data.sampler import Refs as Refs
    from fathoms.data.sampler import Sampler as Sampler
    from fathoms.data.sources.arrays import ArraySource as ArraySource
    from fathoms.data.sources.base import Source as Source
    from fathoms.data.sources.detect import list_splits as list_splits
    from fathoms.data.sources.detect import open_source as open_source
    from fathoms.data.stats import LoaderStats as LoaderStats
    from fathoms.data.tools.manifest import verify_manifest as verify_manifest

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(_HOMES)
