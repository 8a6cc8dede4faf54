"""From a run folder, a checkpoint folder or a weights file to a model that answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fathoms.errors import ConfigError, WeightsError
from fathoms.models.config import FIELDS, ViTConfig
from fathoms.models.header import build_for
from fathoms.models.weights import load_weights
from fathoms.models.zoo import model_config
from fathoms.reading import check_names, read_toml
from fathoms.registry import check_name


@dataclass(frozen=True)
class Trained:
    """A model with its weights, and what is known of its training."""

    model: nn.Module
    image_size: int
    in_channels: int
    classes: tuple[str, ...] | None
    recipe: dict[str, Any]
    data: str | None
    source: str


def run_config(folder: Path) -> dict[str, Any] | None:
    """config.toml of the run that a folder belongs to, if there is one, with everything read from it checked."""
    places = (folder, folder.parent, folder.parent.parent)
    path = next((place / "config.toml" for place in places if (place / "config.toml").is_file()), None)
    if path is None:
        return None
    table = read_toml(path, ConfigError)
    for key in ("model", "recipe"):
        if not isinstance(table.setdefault(key, {}), dict):
            raise ConfigError(f"{path}: {key} is a table; this is no config of a run")
    for key in table["model"]:
        check_name(key, (*FIELDS, "name"), "option", f"{path}: [model]")
    check_names(table.get("classes"), str(path), ConfigError)
    if not isinstance(table.get("data", ""), str):
        raise ConfigError(f"{path}: data is a path; this is no config of a run")
    return table


def weights_file(folder: Path, ema: bool) -> Path:
    """The weights file of a run or checkpoint folder: the average where there is one, of the best epoch."""
    for place in (folder, folder / "checkpoints" / "best", folder / "checkpoints" / "last"):
        for name in ("ema.safetensors", "model.safetensors") if ema else ("model.safetensors",):
            if (place / name).is_file():
                return place / name
    raise WeightsError(
        f"{folder}: holds no weights; give a run folder, a checkpoint folder or a .safetensors file"
    )


def load_trained(checkpoint: str, model: str | None = None, *, ema: bool = True, **overrides: Any) -> Trained:
    """Load a model for use.

    Args:
        checkpoint: A run folder, a checkpoint folder or a weights file.
        model: Name of the model; None takes the run's own.
        ema: Whether the averaged weights are preferred.
        **overrides: Fields of ViTConfig.
    """
    path = Path(checkpoint)
    table = run_config(path if path.is_dir() else path.parent)
    weights = weights_file(path, ema) if path.is_dir() else path
    if model is not None:
        config = model_config(model, **overrides)
        if table is not None and "num_classes" not in overrides:
            config = config.replace(num_classes=len(table["classes"]))
    elif table is not None:
        fields = {key: value for key, value in table["model"].items() if key in FIELDS}
        config = ViTConfig(**fields).replace(num_classes=len(table["classes"]), **overrides)
    else:
        raise ConfigError(f"{checkpoint}: a weights file alone does not say which model it is; give --model")
    vit = build_for(config, weights)
    load_weights(vit, weights)
    classes = tuple(table["classes"]) if table is not None else None
    recipe = table.get("recipe", {}) if table is not None else {}
    data = table.get("data") if table is not None else None
    return Trained(vit.eval(), config.image_size, config.in_channels, classes, recipe, data, str(weights))
