"""Optimizers, learning rate schedules, weight averaging."""

from fathoms.train.optim.build import OPTIMIZERS, build_optimizer, set_lr
from fathoms.train.optim.ema import Ema
from fathoms.train.optim.schedule import SCHEDULES, Schedule

__all__ = ["OPTIMIZERS", "SCHEDULES", "Ema", "Schedule", "build_optimizer", "set_lr"]
