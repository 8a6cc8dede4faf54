"""fathoms: build, train, understand and ship deep Vision Transformers.

Names are imported on first use, so that `import fathoms` and the command line start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fathoms.errors import FathomsError
from fathoms.version import __version__ as __version__

if TYPE_CHECKING:
    from fathoms import parts as parts
    from fathoms.compare.results import load_results as load_results
    from fathoms.evaluate.load import load_run as load_run
    from fathoms.models.config import ViTConfig as ViTConfig
    from fathoms.models.param_groups import param_groups as param_groups
    from fathoms.models.vit import ViT as ViT
    from fathoms.models.weights import load_weights as load_weights
    from fathoms.models.weights import save_weights as save_weights
    from fathoms.models.zoo import create_model as create_model
    from fathoms.models.zoo import list_models as list_models
    from fathoms.probes.signal import probe as probe
    from fathoms.surgery.accelerate.accelerate import accelerate as accelerate
    from fathoms.surgery.fold.fold import fold as fold
    from fathoms.surgery.swap.swap import swap_norms as swap_norms
    from fathoms.surgery.swap.taper import taper as taper

# The module of each public name. The imports above say the same to type checkers.
_HOMES = {
    "ViT": "fathoms.models.vit",
    "ViTConfig": "fathoms.models.config",
    "accelerate": "fathoms.surgery.accelerate.accelerate",
    "create_model": "fathoms.models.zoo",
    "fold": "fathoms.surgery.fold.fold",
    "list_models": "fathoms.models.zoo",
    "load_results": "fathoms.compare.results",
    "load_run": "fathoms.evaluate.load",
    "load_weights": "fathoms.models.weights",
    "param_groups": "fathoms.models.param_groups",
    "probe": "fathoms.probes.signal",
    "save_weights": "fathoms.models.weights",
    "swap_norms": "fathoms.surgery.swap.swap",
    "taper": "fathoms.surgery.swap.taper",
}

__all__ = ["FathomsError", "parts", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "parts":
        return importlib.import_module("fathoms.parts")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fathoms' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
