"""The training objective: losses, distillation, LearnableScaler's penalties."""

from fathoms.train.objective.loss import LOSSES
from fathoms.train.objective.objective import Objective

__all__ = ["LOSSES", "Objective"]
