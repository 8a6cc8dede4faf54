"""fathoms: build, train, compare, understand and ship deep Vision Transformers.

Names are imported when first used, so that `import fathoms` and the command line stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fathoms.errors import FathomsError

if TYPE_CHECKING:
    from fathoms import parts
    from fathoms.models.config import ViTConfig
    from fathoms.models.param_groups import param_groups
    from fathoms.models.vit import ViT
    from fathoms.models.weights import load_weights, save_weights
    from fathoms.models.zoo import create_model, list_models
    from fathoms.probes.signal import probe
    from fathoms.surgery.accelerate.accelerate import accelerate
    from fathoms.surgery.fold.fold import fold
    from fathoms.surgery.swap.swap import swap_norms
    from fathoms.surgery.swap.taper import taper

__version__ = "0.1.0"

__all__ = [
    "FathomsError",
    "ViT",
    "ViTConfig",
    "accelerate",
    "create_model",
    "fold",
    "list_models",
    "load_weights",
    "param_groups",
    "parts",
    "probe",
    "save_weights",
    "swap_norms",
    "taper",
]

_HOMES = {
    "ViT": "fathoms.models.vit",
    "ViTConfig": "fathoms.models.config",
    "accelerate": "fathoms.surgery.accelerate.accelerate",
    "create_model": "fathoms.models.zoo",
    "fold": "fathoms.surgery.fold.fold",
    "list_models": "fathoms.models.zoo",
    "load_weights": "fathoms.models.weights",
    "param_groups": "fathoms.models.param_groups",
    "probe": "fathoms.probes.signal",
    "save_weights": "fathoms.models.weights",
    "swap_norms": "fathoms.surgery.swap.swap",
    "taper": "fathoms.surgery.swap.taper",
}


def __getattr__(name: str) -> Any:
    if name == "parts":
        return importlib.import_module("fathoms.parts")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fathoms' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
