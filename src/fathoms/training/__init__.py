"""Training: `Trainer(job, world).run()` trains a model from a `Job` to the summary in its run folder.

Names are imported when first used, so that `fathoms train --help` does not import torch. README.md in this folder says
what each file holds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathoms.training.distributed import World, join_world
    from fathoms.training.guard import DivergedError
    from fathoms.training.job import Job, RunOptions
    from fathoms.training.recipe import Recipe, read_recipe
    from fathoms.training.run import Trainer
    from fathoms.training.run_folder import Outcome

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
    "DivergedError": "guard",
    "Job": "job",
    "Outcome": "run_folder",
    "Recipe": "recipe",
    "RunOptions": "job",
    "Trainer": "run",
    "World": "distributed",
    "join_world": "distributed",
    "read_recipe": "recipe",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the file that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(_HOMES)
