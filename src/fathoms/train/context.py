"""What a run stands in: its job, its processes, its data and its folder."""

from __future__ import annotations

import math
from typing import NamedTuple

from fathoms.train.build import Data
from fathoms.train.distributed import World
from fathoms.train.job import Job
from fathoms.train.record.run_folder import RunFolder


class Scene(NamedTuple):
    """All that a run is given and does not change."""

    job: Job
    world: World
    data: Data
    folder: RunFolder

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps of one epoch; the last may gather fewer gradients."""
        return math.ceil(self.data.train.batches / self.job.recipe.grad_accum_steps)
