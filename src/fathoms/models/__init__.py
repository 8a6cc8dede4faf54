"""The Vision Transformer: config, model, named models and weights.

Names are imported when first used, so that reading a config does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathoms.models.config import ViTConfig
    from fathoms.models.vit import ViT, create_model
    from fathoms.models.weights import LoadReport, load_weights, save_weights
    from fathoms.models.zoo import list_models, model_config

__all__ = [
    "LoadReport",
    "ViT",
    "ViTConfig",
    "create_model",
    "list_models",
    "load_weights",
    "model_config",
    "save_weights",
]

_HOMES = {
    "LoadReport": "weights",
    "ViT": "vit",
    "ViTConfig": "config",
    "create_model": "vit",
    "list_models": "zoo",
    "load_weights": "weights",
    "model_config": "zoo",
    "save_weights": "weights",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"fathoms.models.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fathoms.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
