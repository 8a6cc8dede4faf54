"""Load trained models, evaluate them, and predict with them (`fathoms.evaluate.predict.predict`)."""

from fathoms.evaluate.load import LoadedModel, load_run
from fathoms.evaluate.loader import eval_loader
from fathoms.evaluate.metrics import Evaluation, evaluate
from fathoms.evaluate.predict import Prediction
from fathoms.evaluate.preprocessing import Preprocessing

__all__ = [
    "Evaluation",
    "LoadedModel",
    "Prediction",
    "Preprocessing",
    "eval_loader",
    "evaluate",
    "load_run",
]
