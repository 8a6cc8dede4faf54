"""Save a model to a folder or the Hub, and build it again from there: config and weights, nothing executed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.errors import ConfigError, WeightsError
from fathoms.files.atomic import write_atomic
from fathoms.files.untrusted import read_json
from fathoms.models import hub
from fathoms.models.config import ViTConfig
from fathoms.models.resolve import resolve_trained
from fathoms.models.weights import build_for, load_weights, save_weights

if TYPE_CHECKING:
    from fathoms.models.vit import ViT


def save_pretrained(model: ViT, folder: str | Path) -> Path:
    """Write `model.safetensors` and its config, as `fathoms export` names them; returns the weights file."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise WeightsError(
            f"save_pretrained: {folder}: is a file, not a folder; give another name"
        ) from error
    except OSError as error:
        raise WeightsError(
            f"save_pretrained: {folder}: cannot be made ({error.strerror}); give another folder"
        ) from error
    card = {"file": hub.FILE, "model": "vit", "config": model.config.to_dict()}
    save_weights(model, folder / hub.FILE)
    write_atomic(folder / hub.CARD, (json.dumps(card, indent=2) + "\n").encode())
    return folder / hub.FILE


def from_pretrained(source: str | Path, **overrides: Any) -> ViT:
    """Build a model from a folder of `save_pretrained`, or from hf-hub:OWNER/NAME[@REVISION].

    Args:
        source: The folder, or the repository.
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
    """Upload a model as `save_pretrained` writes it, in one commit; returns hf-hub:OWNER/NAME@COMMIT."""
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        files = {name: Path(folder) / name for name in (hub.FILE, hub.CARD)}
        return hub.push(repo.removeprefix(hub.PREFIX), files, public=public)


def _files(source: str | Path) -> tuple[Path, Path]:
    """The weights and the card."""
    found = resolve_trained(str(source))
    if found.kind == "hub":
        weights, exact = hub.fetch(found.text)
        return weights, hub.fetch(exact, hub.CARD)[0]
    for name in (hub.FILE, hub.CARD):
        if not (found.path / name).is_file():
            raise WeightsError(f"{source}: holds no {name}; a run folder is opened by fathoms.load_run")
    return found.path / hub.FILE, found.path / hub.CARD
