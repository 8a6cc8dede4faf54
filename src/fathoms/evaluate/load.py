"""From a run folder, a checkpoint folder, a weights file or a Hub repository to a model that answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError, WeightsError
from fathoms.evaluate.preprocessing import Look
from fathoms.models import hub
from fathoms.models.config import FIELDS, ViTConfig
from fathoms.models.vit import ViT
from fathoms.models.weights import build_for, load_weights
from fathoms.models.zoo import model_config
from fathoms.registry import check_name
from fathoms.untrusted_files import check_names, read_json, read_toml

TIMM = "timm/"
# A card holds the names of all classes; a summary names every picture that could not be read.
MAX_CARD = 64 << 20


@dataclass(frozen=True)
class Trained:
    """A model with its weights, and what is known of its training.

    Args:
        model: Ready for inference.
        config: What it is built from.
        name: What it is called.
        classes: Their names; None where nobody wrote them down.
        recipe: How it was trained; empty where that is not known.
        metrics: What it achieved; empty where that is not known.
        data: What it was trained on.
        source: The weights file, or the Hub repository with the commit that was read.
        run: The folder of its run, if it has one.
    """

    model: ViT
    config: ViTConfig
    name: str
    classes: tuple[str, ...] | None
    recipe: dict[str, Any]
    metrics: dict[str, Any]
    data: str | None
    source: str
    run: Path | None

    @property
    def look(self) -> Look:
        """How pictures were brought into its form."""
        return Look.of(self.recipe)


@dataclass(frozen=True)
class _Known:
    """What the card beside some weights, or the run they come from, says of them."""

    config: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    classes: tuple[str, ...] | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    swap_norms: str | None = None
    run: Path | None = None


def _checked(table: dict[str, Any], path: Path) -> _Known:
    """What a card or a config.toml says, with everything that is read from it checked."""
    tables: dict[str, Any] = {key: table.get(key) or {} for key in ("config", "recipe", "metrics")}
    for key, value in tables.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {key} is a table; make the file again")
    texts: dict[str, Any] = {key: table.get(key) for key in ("name", "data", "swap_norms")}
    for key, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{path}: {key} is a text; make the file again")
    classes = table.get("classes")
    if classes is not None:
        classes = check_names(classes, str(path), ConfigError)
    return _Known(**tables, **texts, classes=classes)


def _from_card(path: Path) -> _Known:
    """What the card of an exported model says."""
    card = read_json(path, ConfigError, MAX_CARD)
    if not isinstance(card.get("config"), dict):
        raise ConfigError(f"{path}: no card of an exported model; it has no config")
    return _checked({**card, "name": card.get("model"), "swap_norms": None}, path)


def run_config(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The folder and the config.toml of the run that a folder belongs to, if it belongs to one."""
    places = (folder, folder.parent, folder.parent.parent)
    run = next((place for place in places if (place / "config.toml").is_file()), None)
    if run is None:
        return None
    path = run / "config.toml"
    table = read_toml(path, ConfigError)
    if not isinstance(table.get("model"), dict):
        raise ConfigError(f"{path}: model is a table; this is no config of a run")
    for key in table["model"]:
        check_name(key, (*FIELDS, "name"), "option", f"{path}: [model]")
    _checked(table, path)
    return run, table | {"classes": check_names(table.get("classes"), str(path), ConfigError)}


def _from_run(folder: Path) -> _Known | None:
    """What config.toml and summary.json say of the run that a folder belongs to, if it belongs to one."""
    found = run_config(folder)
    if found is None:
        return None
    run, table = found
    name = table["model"].get("name")
    if isinstance(name, str) and name.startswith(TIMM):
        raise ConfigError(f"{run}: a run of {name}, which is not fathoms' own; load its weights with timm")
    config = {key: value for key, value in table["model"].items() if key != "name"}
    config["num_classes"] = len(table["classes"])
    metrics: dict[str, Any] = {}
    if (run / "summary.json").is_file():
        summary = read_json(run / "summary.json", ConfigError, MAX_CARD)
        metrics = {key: summary[key] for key in ("status", "epoch", "best", "last") if key in summary}
    told = {**table, "config": config, "name": name, "metrics": metrics}
    return replace(_checked(told, run / "config.toml"), run=run)


def weights_file(folder: Path, ema: bool) -> Path:
    """The weights file of a run or checkpoint folder: the average where there is one, of the best epoch."""
    places = [folder / "checkpoints" / "best", folder / "checkpoints" / "last", folder]
    for place in places:
        for name in ("ema.safetensors", "model.safetensors") if ema else ("model.safetensors",):
            if (place / name).is_file():
                return place / name
    raise WeightsError(
        f"{folder}: holds no weights; give a run folder, a checkpoint folder or a .safetensors file"
    )


def _from_hub(checkpoint: str) -> tuple[Path, str, _Known]:
    """The weights of a repository, its name with the commit, and its card where it has one."""
    path, source = hub.fetch(checkpoint)
    try:
        card, _ = hub.fetch(source, hub.CARD)
    except hub.NoSuchFileError:
        return path, source, _Known()
    return path, source, _from_card(card)


def _locate(checkpoint: str, ema: bool) -> tuple[Path, str, _Known]:
    """The weights file, what to call it, and what is known of it: from its card, else from its run."""
    path = Path(checkpoint)
    if path.is_dir():
        weights = weights_file(path, ema)
        return weights, str(weights), _from_run(path) or _Known()
    if hub.is_hub_id(checkpoint):
        try:
            return _from_hub(checkpoint)
        except WeightsError as error:
            raise WeightsError(f"{error}; and there is no such folder or file here") from error
    if not path.is_file():
        raise WeightsError(f"{path}: no such file or folder; give a run, a checkpoint or a .safetensors file")
    card = path.with_name(f"{path.name}.json")
    known = _from_card(card) if card.is_file() else _from_run(path.parent)
    return path, str(path), known or _Known()


def _swapped(model: ViT, to: str | None) -> ViT:
    """A model whose norms were swapped before it was trained, as its run did it."""
    if to is not None:
        from fathoms.surgery.swap.swap import swap_norms

        swap_norms(model, to, how="reset")
    return model


def load_trained(checkpoint: str, model: str | None = None, *, ema: bool = True, **overrides: Any) -> Trained:
    """Load a model for use, with what its run or its card says of it.

    Args:
        checkpoint: A run folder, a checkpoint folder, a weights file, or OWNER/NAME[@REVISION] on the Hub.
        model: Name of the model; None takes what the run or the card says.
        ema: Whether the averaged weights are preferred.
        **overrides: Fields of ViTConfig.
    """
    weights, source, known = _locate(checkpoint, ema)
    if model is not None:
        classes = {} if known.classes is None else {"num_classes": len(known.classes)}
        config = model_config(model, **{**classes, **overrides})
    elif known.config:
        config = ViTConfig().replace(**known.config).replace(**overrides)
    else:
        raise ConfigError(f"{checkpoint}: a weights file alone does not say which model it is; give --model")
    vit = _swapped(build_for(config, weights), known.swap_norms)
    load_weights(vit, weights)
    return Trained(
        vit.eval(),
        vit.config,
        model or known.name or "model",
        known.classes,
        known.recipe,
        known.metrics,
        known.data,
        source,
        known.run,
    )
