"""A run's model with its weights, whatever it was built from: a fathoms model or one of timm's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fathoms.errors import ConfigError
from fathoms.evaluate.load import load_trained, run_config, weights_file
from fathoms.models.build_timm import build_timm, timm_size
from fathoms.models.weights import read_tensors
from fathoms.surgery.swap.swap import swap_norms
from fathoms.train.checkpoint.state_dict import put_weights
from fathoms.train.job import TIMM


@dataclass(frozen=True)
class Loaded:
    """A model ready to be measured, and what its run says of it."""

    model: nn.Module
    image_size: int
    in_channels: int
    classes: tuple[str, ...] | None
    recipe: dict[str, Any]
    data: str | None


def load_run(checkpoint: str, model: str | None = None, *, ema: bool = True, **overrides: Any) -> Loaded:
    """Load a model for use; see `load_trained` for the arguments."""
    path = Path(checkpoint)
    found = run_config(path if path.is_dir() else path.parent)
    table: dict[str, Any] = {} if found is None else found[1]
    name = str(model if model is not None else table.get("model", {}).get("name", ""))
    if not name.startswith(TIMM):
        trained = load_trained(checkpoint, model, ema=ema, **overrides)
        config = trained.config
        told = (trained.classes, trained.recipe, trained.data)
        return Loaded(trained.model, config.image_size, config.in_channels, *told)
    if found is None:
        raise ConfigError(f"{checkpoint}: timm's models are loaded from the folder of their run; give that")
    if overrides:
        raise ConfigError(
            f"--{next(iter(overrides)).replace('_', '-')}: this run's model has one size; leave it out"
        )
    built = build_timm(name, len(table["classes"]))
    if table.get("swap_norms") is not None:
        swap_norms(built, str(table["swap_norms"]), how="reset")
    weights = weights_file(path, ema) if path.is_dir() else path
    put_weights(built, read_tensors(weights, str(weights)), str(weights))
    told = (table["classes"], table.get("recipe", {}), table.get("data"))
    return Loaded(built.eval(), timm_size(name), 3, *told)
