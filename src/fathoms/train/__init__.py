"""Training: `Trainer(job, world).run()` trains a model from a `Job` to the summary in its run folder.

Names are imported when first used, so that `fathoms train --help` does not import torch. README.md in this folder says
what each room holds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathoms.train.distributed import World, join_world
    from fathoms.train.guard.policy import DivergedError
    from fathoms.train.job import Job, RunOptions
    from fathoms.train.recipe.files import read_recipe
    from fathoms.train.recipe.recipe import Recipe
    from fathoms.train.record.run_folder import Outcome
    from fathoms.train.trainer import Trainer

__all__ = [
    "DivergedError",
    "Job",
    "Outcome",
    "Recipe",
    "RunOptions",
    "Trainer",
    "World",
    "join_world",
    "read_recipe",
]

_HOMES = {
    "DivergedError": "guard.policy",
    "Job": "job",
    "Outcome": "record.run_folder",
    "Recipe": "recipe.recipe",
    "RunOptions": "job",
    "Trainer": "trainer",
    "World": "distributed",
    "join_world": "distributed",
    "read_recipe": "recipe.files",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the file that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(_HOMES)
