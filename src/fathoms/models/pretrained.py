"""Save a model to a folder or the Hub, and build it again from there: config and weights, nothing executed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.atomic import write_atomic
from fathoms.errors import ConfigError, WeightsError
from fathoms.models import hub
from fathoms.models.config import ViTConfig
from fathoms.models.weights import build_for, load_weights, save_weights
from fathoms.untrusted_files import read_json

if TYPE_CHECKING:
    from fathoms.models.vit import ViT

HUB = "hf-hub:"
"""Prefix of a repository's name, as in timm."""


def save_pretrained(model: ViT, folder: str | Path) -> Path:
    """Write `model.safetensors` and its config, as `fathoms export` names them; returns the weights file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    card = {"file": hub.FILE, "model": "vit", "config": model.config.to_dict()}
    save_weights(model, folder / hub.FILE)
    write_atomic(folder / hub.CARD, (json.dumps(card, indent=2) + "\n").encode())
    return folder / hub.FILE


def from_pretrained(source: str | Path, **overrides: Any) -> ViT:
    """Build a model from a folder of `save_pretrained`, or from "OWNER/NAME[@REVISION]" on the Hub.

    Args:
        source: The folder, or the repository, with or without the prefix "hf-hub:".
        **overrides: Fields of ViTConfig that leave the weights as they are, such as image_size or drop_path.
    """
    weights, card = _files(source)
    config = read_json(card, WeightsError).get("config")
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: its card holds no config, so the model is not known")
    model = build_for(ViTConfig().replace(**config).replace(**overrides), weights)
    load_weights(model, weights)
    return model.eval()


def push_to_hub(model: ViT, repo: str, *, public: bool = False) -> str:
    """Upload a model as `save_pretrained` writes it, in one commit; returns OWNER/NAME@COMMIT."""
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        files = {name: Path(folder) / name for name in (hub.FILE, hub.CARD)}
        return hub.push(repo.removeprefix(HUB), files, public=public)


def _files(source: str | Path) -> tuple[Path, Path]:
    """The weights and the card."""
    text = str(source)
    folder = Path(source)
    if folder.is_dir():
        for name in (hub.FILE, hub.CARD):
            if not (folder / name).is_file():
                raise WeightsError(f"{folder}: holds no {name}; a run folder is opened by fathoms.load_run")
        return folder / hub.FILE, folder / hub.CARD
    if text.startswith(HUB) or hub.is_hub_id(text):
        weights, exact = hub.fetch(text.removeprefix(HUB))
        return weights, hub.fetch(exact, hub.CARD)[0]
    raise WeightsError(
        f"{folder}: no such folder; give a folder of save_pretrained, or OWNER/NAME on the Hub"
    )
