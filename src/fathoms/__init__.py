"""fathoms: build, train, compare, understand and ship deep Vision Transformers.

Names are imported on first use, so that `import fathoms` and the command line start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fathoms.errors import FathomsError
from fathoms.version import __version__ as __version__

if TYPE_CHECKING:
    from fathoms import parts as parts
    from fathoms.commands import Comparison as Comparison
    from fathoms.commands import Costs as Costs
    from fathoms.commands import compare as compare
    from fathoms.commands import cost as cost
    from fathoms.commands import probe as probe
    from fathoms.comparing.results import load_results as load_results
    from fathoms.comparing.scores import judge as judge
    from fathoms.evaluating.load import load_run as load_run
    from fathoms.models.config import ViTConfig as ViTConfig
    from fathoms.models.param_groups import param_groups as param_groups
    from fathoms.models.vit import ViT as ViT
    from fathoms.models.vit import create_model as create_model
    from fathoms.models.weights import load_weights as load_weights
    from fathoms.models.weights import save_weights as save_weights
    from fathoms.models.zoo import list_models as list_models
    from fathoms.probes.coordinates import coordinate_check as coordinate_check
    from fathoms.surgery.accelerate import accelerate as accelerate
    from fathoms.surgery.fold import fold as fold
    from fathoms.surgery.norm_sites import norms as norms
    from fathoms.surgery.swap import swap_norms as swap_norms
    from fathoms.verbs import Run as Run
    from fathoms.verbs import evaluate as evaluate
    from fathoms.verbs import export as export
    from fathoms.verbs import predict as predict
    from fathoms.verbs import train as train

# The module of each public name. The imports above say the same to type checkers.
_HOMES = {
    "ViT": "fathoms.models.vit",
    "ViTConfig": "fathoms.models.config",
    **dict.fromkeys(("Comparison", "Costs", "compare", "cost", "probe"), "fathoms.commands"),
    "accelerate": "fathoms.surgery.accelerate",
    "create_model": "fathoms.models.vit",
    "fold": "fathoms.surgery.fold",
    "judge": "fathoms.comparing.scores",
    "list_models": "fathoms.models.zoo",
    "load_results": "fathoms.comparing.results",
    "load_run": "fathoms.evaluating.load",
    "load_weights": "fathoms.models.weights",
    "param_groups": "fathoms.models.param_groups",
    "save_weights": "fathoms.models.weights",
    "norms": "fathoms.surgery.norm_sites",
    "swap_norms": "fathoms.surgery.swap",
    **dict.fromkeys(("Run", "evaluate", "export", "predict", "train"), "fathoms.verbs"),
    "coordinate_check": "fathoms.probes.coordinates",
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
