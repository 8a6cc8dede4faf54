"""Load trained models, evaluate them, and predict with them (`fathoms.evaluating.predict.predict`).

Names are imported when first used, so that reading the record of a run does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathoms.evaluating.load import LoadedModel, load_run
    from fathoms.evaluating.metrics import Evaluation, evaluate
    from fathoms.evaluating.predict import Prediction
    from fathoms.evaluating.preprocessing import Preprocessing, eval_loader

__all__ = [
    "Evaluation",
    "LoadedModel",
    "Prediction",
    "Preprocessing",
    "eval_loader",
    "evaluate",
    "load_run",
]

_HOMES = {
    "Evaluation": "metrics",
    "LoadedModel": "load",
    "Prediction": "predict",
    "Preprocessing": "preprocessing",
    "eval_loader": "preprocessing",
    "evaluate": "metrics",
    "load_run": "load",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"fathoms.evaluating.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fathoms.evaluating' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
