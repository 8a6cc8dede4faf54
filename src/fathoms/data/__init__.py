"""Images in: sources, fast decoding, augmentation on the device, loaders that resume anywhere.

Names are imported when first used, so that a command that needs one of them does not load them all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathoms.data.augment.mix import MixOptions, soft_targets
    from fathoms.data.augment.pipeline import IMAGENET_MEAN, IMAGENET_STD, Augment, AugmentOptions
    from fathoms.data.batch import Batch
    from fathoms.data.crop.random_crop import CropOptions
    from fathoms.data.crop.transforms import EvalView, TrainView
    from fathoms.data.decode.decode import Decoder, choose_decoder
    from fathoms.data.device.backend import choose_backend
    from fathoms.data.device_loader import ResidentLoader
    from fathoms.data.errors import ArchiveError, BadImageError, DataError, LoaderError
    from fathoms.data.loader import Loader, LoaderOptions
    from fathoms.data.sampler import Plan, Refs
    from fathoms.data.sources.arrays import ArraySource
    from fathoms.data.sources.base import Source
    from fathoms.data.sources.detect import list_splits, open_source
    from fathoms.data.stats import LoaderStats
    from fathoms.data.tools.manifest import verify_manifest

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ArchiveError",
    "ArraySource",
    "Augment",
    "AugmentOptions",
    "BadImageError",
    "Batch",
    "CropOptions",
    "DataError",
    "Decoder",
    "EvalView",
    "Loader",
    "LoaderError",
    "LoaderOptions",
    "LoaderStats",
    "MixOptions",
    "Plan",
    "Refs",
    "ResidentLoader",
    "Source",
    "TrainView",
    "choose_backend",
    "choose_decoder",
    "list_splits",
    "open_source",
    "soft_targets",
    "verify_manifest",
]

_HOMES = {
    "ArchiveError": "fathoms.data.errors",
    "ArraySource": "fathoms.data.sources.arrays",
    "Augment": "fathoms.data.augment.pipeline",
    "AugmentOptions": "fathoms.data.augment.pipeline",
    "BadImageError": "fathoms.data.errors",
    "Batch": "fathoms.data.batch",
    "CropOptions": "fathoms.data.crop.random_crop",
    "DataError": "fathoms.data.errors",
    "Decoder": "fathoms.data.decode.decode",
    "EvalView": "fathoms.data.crop.transforms",
    "IMAGENET_MEAN": "fathoms.data.augment.pipeline",
    "IMAGENET_STD": "fathoms.data.augment.pipeline",
    "Loader": "fathoms.data.loader",
    "LoaderError": "fathoms.data.errors",
    "LoaderOptions": "fathoms.data.loader",
    "LoaderStats": "fathoms.data.stats",
    "MixOptions": "fathoms.data.augment.mix",
    "Plan": "fathoms.data.sampler",
    "Refs": "fathoms.data.sampler",
    "ResidentLoader": "fathoms.data.device_loader",
    "Source": "fathoms.data.sources.base",
    "TrainView": "fathoms.data.crop.transforms",
    "choose_backend": "fathoms.data.device.backend",
    "choose_decoder": "fathoms.data.decode.decode",
    "list_splits": "fathoms.data.sources.detect",
    "open_source": "fathoms.data.sources.detect",
    "soft_targets": "fathoms.data.augment.mix",
    "verify_manifest": "fathoms.data.tools.manifest",
}


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(_HOMES)
