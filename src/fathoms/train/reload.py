"""A run's model with its weights, whatever it was built from: a fathoms model, one of timm's, norms swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fathoms.errors import ConfigError, WeightsError
from fathoms.evaluate.checkpoint import Trained, load_trained, run_config, weights_file
from fathoms.models.config import FIELDS, ViTConfig
from fathoms.models.vit import ViT
from fathoms.surgery.swap import swap_norms
from fathoms.train.foreign import build_timm, timm_size
from fathoms.train.job import TIMM
from fathoms.train.state import put_weights


def load_run(checkpoint: str, model: str | None = None, *, ema: bool = True, **overrides: Any) -> Trained:
    """Load a model for use; see `load_trained` for the arguments."""
    path = Path(checkpoint)
    table = run_config(path if path.is_dir() else path.parent)
    name = model if model is not None else (table or {}).get("model", {}).get("name", "")
    swapped = (table or {}).get("swap_norms")
    if not name.startswith(TIMM) and swapped is None:
        return load_trained(checkpoint, model, ema=ema, **overrides)
    if table is None:
        raise ConfigError(f"{checkpoint}: timm's models are loaded from the folder of their run; give that")
    if overrides:
        raise ConfigError(
            f"--{next(iter(overrides)).replace('_', '-')}: this run's model has one size; leave it out"
        )
    classes = tuple(table["classes"])
    weights = weights_file(path, ema) if path.is_dir() else path
    built: nn.Module
    if name.startswith(TIMM):
        built, size, channels = build_timm(name, len(classes)), timm_size(name), 3
    else:
        fields = {key: value for key, value in table["model"].items() if key in FIELDS}
        config = ViTConfig(**fields).replace(num_classes=len(classes))
        built, size, channels = ViT(config), config.image_size, config.in_channels
    if swapped is not None:
        swap_norms(built, str(swapped), how="reset")
    try:
        state = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{weights}: no readable weights ({' '.join(str(error).split())})") from error
    put_weights(built, state, str(weights))
    return Trained(built.eval(), size, channels, classes, table["recipe"], table.get("data"), str(weights))
