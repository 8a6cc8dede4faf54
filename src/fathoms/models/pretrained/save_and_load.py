"""Save a model to a folder or the Hub, and build it again from there: weights and card, nothing executed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fathoms.errors import ConfigError, WeightsError
from fathoms.files.atomic import write_atomic
from fathoms.files.untrusted import MAX_CARD, read_json, sha256_of
from fathoms.models import hub
from fathoms.models.config import FIELDS, ViTConfig
from fathoms.models.pretrained.card import card_entries, kept_entries
from fathoms.models.resolve import resolve
from fathoms.models.weights import MisfitError, build_for, load_weights, said, save_weights
from fathoms.names.registry import check_name

if TYPE_CHECKING:
    from fathoms.models.vit import ViT

_TAKES = "a folder of save_pretrained, a .safetensors file with its card, or hf-hub:OWNER/NAME[@REVISION]"
# Arguments of other libraries' from_pretrained and torch.load, and what does their work here.
_ELSEWHERE = {
    "revision": "write it into the name, hf-hub:OWNER/NAME@REVISION",
    **dict.fromkeys(("map_location", "device", "device_map"), "move the model with .to(DEVICE)"),
    **dict.fromkeys(("dtype", "torch_dtype"), "cast the model with .to(DTYPE)"),
    **dict.fromkeys(("token", "use_auth_token"), "log in with `hf auth login`"),
    "cache_dir": "set the environment variable HF_HOME",
    "local_files_only": "set the environment variable HF_HUB_OFFLINE=1",
    "strict": "weights are always loaded strictly; fathoms.load_weights has skip=",
    "trust_remote_code": "nothing of a repository is executed",
    "weights_only": "nothing but safetensors is opened",
}


def save_pretrained(
    model: ViT, folder: str | Path, *, preprocessing: Any = None, classes: Sequence[str] | None = None
) -> Path:
    """Write `model.safetensors` and its card, as `fathoms export` names them; returns the weights file.

    Args:
        model: A model that its config describes.
        folder: Made if it is not there.
        preprocessing: A table or a `Preprocessing`; None takes what `load_run` or `from_pretrained` found.
        classes: Names of the outputs; None takes what was found.
    """
    check_described(model)
    entries = card_entries(model, preprocessing, classes)
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
    weights = folder / hub.FILE
    save_weights(model, weights)
    card = {"file": hub.FILE, "sha256": sha256_of(weights), **entries}
    write_atomic(folder / hub.CARD, (json.dumps(card, indent=2) + "\n").encode())
    return weights


def check_described(model: ViT) -> None:
    """Refuse a model that its config would not build again: a folded one, one in the middle of a taper."""
    from fathoms.models.vit import ViT

    with torch.device("meta"):
        twin = ViT(model.config)
    shapes = [{name: value.shape for name, value in each.named_parameters()} for each in (model, twin)]
    modules = dict(model.named_modules())
    # Two norms may have parameters of the same names.
    same = shapes[0] == shapes[1] and all(
        isinstance(modules.get(name), type(module))
        for name, module in twin.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    )
    if not same:
        raise WeightsError(
            "save_pretrained: no ViTConfig describes this model (folded, tapering or swapped in part), so it could "
            "not be loaded again; save it before that, or export it to ONNX (`fathoms export --fold`)"
        )


def from_pretrained(source: str | Path, **overrides: Any) -> ViT:
    """Build a model from what `save_pretrained` or `fathoms export --format safetensors` wrote, here or on the Hub.

    Args:
        source: The folder, the weights file with its card next to it, or hf-hub:OWNER/NAME[@REVISION].
        **overrides: Fields of ViTConfig that leave the weights as they are, such as image_size or drop_path.
    """
    for name in overrides:
        _check_argument(name)
    weights, path = _files(str(source))
    card = read_json(path, WeightsError, MAX_CARD)
    config = card.get("config")
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: its card holds no config, so the model is not known")
    model = build_for(ViTConfig().replace(**config).replace(**overrides), weights)
    try:
        load_weights(model, weights)
    except MisfitError as error:
        raise _misfit(error, source, overrides) from error
    model.card = kept_entries(card, str(path))
    return model.eval()


def _check_argument(name: str) -> None:
    if name in FIELDS:
        return
    if name in _ELSEWHERE:
        raise ConfigError(
            f"from_pretrained: takes a source and fields of ViTConfig, not {name}=; {_ELSEWHERE[name]}"
        )
    check_name(name, FIELDS, "field of ViTConfig", "from_pretrained")


def _misfit(error: MisfitError, source: str | Path, overrides: dict[str, Any]) -> WeightsError:
    """The error for weights of another model than the card and the overrides say."""
    blamed = [name for name in error.settings if name in overrides] or list(overrides)
    if not blamed:
        why = said(error.settings) or str(error)
        return WeightsError(
            f"from_pretrained: {source}: its weights are not those of its card ({why}); fetch both again"
        )
    if blamed == ["num_classes"]:
        theirs, wanted = error.settings.get("num_classes", ("other", overrides["num_classes"]))
        return WeightsError(
            f"from_pretrained: num_classes={wanted}: {source} has {theirs} classes; leave it out, then start a new "
            f"classifier with model.reset_classifier({wanted})"
        )
    given = ", ".join(f"{name}={overrides[name]!r}" for name in blamed)
    why = f" ({said(error.settings)})" if error.settings else ""
    return WeightsError(
        f"from_pretrained: {given}: {source} holds the weights of another model{why}; leave it out"
    )


def push_to_hub(
    model: ViT,
    repo: str,
    *,
    public: bool = False,
    preprocessing: Any = None,
    classes: Sequence[str] | None = None,
) -> str:
    """Upload a model as `save_pretrained` writes it, in one commit; returns hf-hub:OWNER/NAME@COMMIT."""
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder, preprocessing=preprocessing, classes=classes)
        files = {name: Path(folder) / name for name in (hub.FILE, hub.CARD)}
        return hub.push(repo.removeprefix(hub.PREFIX), files, public=public)


def _files(source: str) -> tuple[Path, Path]:
    """The weights and the card."""
    found = resolve(source, "from_pretrained:", _TAKES)
    if found.kind in ("zoo", "timm"):
        raise WeightsError(
            f"from_pretrained: {source}: names an architecture without weights; give {_TAKES}, or build it with "
            "fathoms.create_model"
        )
    if found.kind == "hub":
        return _fetched(found.text)
    if found.path.is_dir():
        weights = found.path / hub.FILE
        for name in (hub.FILE, hub.CARD):
            if not (found.path / name).is_file():
                raise WeightsError(
                    f"from_pretrained: {source}: holds no {name}; a run folder is opened by fathoms.load_run"
                )
    else:
        weights = found.path.with_suffix("") if found.path.name.endswith(".safetensors.json") else found.path
    card = weights.with_name(f"{weights.name}.json")
    if weights.suffix == ".safetensors" and not card.is_file():
        raise WeightsError(
            f"from_pretrained: {source}: has no card {card.name} next to it that says the model; load it with "
            "fathoms.create_model(NAME, weights=...)"
        )
    if weights.suffix != ".safetensors" or not weights.is_file():
        raise WeightsError(f"from_pretrained: {source}: not weights that can be opened; give {_TAKES}")
    return weights, card


def _fetched(name: str) -> tuple[Path, Path]:
    weights, exact = hub.fetch(name)
    try:
        return weights, hub.fetch(exact, hub.CARD)[0]
    except hub.NoSuchFileError as error:
        raise WeightsError(
            f"from_pretrained: {name}: holds no {hub.CARD} that says the model; load it with "
            f"fathoms.create_model(NAME, weights={name!r})"
        ) from error
