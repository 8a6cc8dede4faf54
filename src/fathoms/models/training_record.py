"""Read the record of a model's training from its run folder or its card, with every value checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError, WeightsError, flag_of
from fathoms.models.build_timm import TIMM
from fathoms.models.config import FIELDS, OF_TRAINING, TOLD_BY_WEIGHTS, ViTConfig
from fathoms.models.recorded_arguments import changed_by
from fathoms.models.weights_file import record_in_header
from fathoms.models.zoo import ALIASES, MODELS, model_config
from fathoms.registry import check_name
from fathoms.untrusted import MAX_CARD, check_names, read_json, read_toml

DO_WITHOUT = (
    "remove the file: the weights are not in it, and giving the training command again writes it anew"
)
"""Remedy for a damaged summary of a run."""
TABLES = ("config", "recipe", "preprocessing", "metrics")
OF_SWAP = ("norm", "norm_init", "norm_by_depth", "final_norm", "qk_norm")
"""Fields of a config that `swap_norms` replaces."""
# A name says nothing of these.
_FREE = (*TOLD_BY_WEIGHTS, *OF_TRAINING)


@dataclass(frozen=True)
class TrainingRecord:
    """The card or the run folder that belongs to some weights; empty where there is neither.

    Args:
        config: Fields of ViTConfig; for a timm model its `num_classes` at most.
        name: Name of the model.
        classes: Their names.
        recipe: How it was trained.
        preprocessing: What evaluation does to its images; empty in records from before it was written down.
        metrics: What it achieved; of a run folder all it has, see `of_weights`.
        data: What it was trained on.
        swap_norms: The norm that replaced the model's own before training.
        run: The run folder.
        module: Side of the images of a module that Python code gave, which `name` is the class of; None of a model that
            a name builds.
    """

    config: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    classes: tuple[str, ...] | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    swap_norms: str | None = None
    run: Path | None = None
    module: int | None = None

    @property
    def vit(self) -> ViTConfig | None:
        """The recorded config; None of a timm model, and without a record."""
        return ViTConfig().replace(**self.config) if self.config.keys() - {"num_classes"} else None

    def check(self, model: str | None, asked: Mapping[str, Any], where: str) -> None:
        """Refuse a model's name, or fields of ViTConfig, that describe another model than the recorded one.

        Weights of another placement or of other heads fit by shape and compute something else. Another image size may
        be asked for, as positions are resized; a name alone does not ask for one.
        """
        if model is not None and (told := self.told(model, asked)):
            raise WeightsError(f"--model {model}: {where} was trained with {_said(told)}; leave it out")
        if differ := self.differ(asked):
            flags = " ".join(map(flag_of, differ))
            raise WeightsError(f"{flags}: {where} was trained with {_said(differ)}; leave it out")

    def check_start(self, model: str, config: ViTConfig, swap_norms: str | None, where: str) -> None:
        """Refuse to start the training of a model from weights that were trained as another one."""
        differ = self.differ(config.to_dict()) if self.vit is not None else self.told(model)
        # NORM:INIT starts a norm otherwise and is the same norm.
        swapped = [str(norms).partition(":")[0] for norms in (self.swap_norms, swap_norms)]
        if (self.run is not None or self.swap_norms is not None) and swapped[0] != swapped[1]:
            differ["swap_norms"] = (self.swap_norms, swap_norms)
        if differ:
            flags = " ".join(
                f"{flag_of(name)} {theirs}" for name, (theirs, _) in differ.items() if theirs is not None
            )
            raise WeightsError(
                f"--initial-checkpoint: {where} was trained with {_said(differ)}; give {flags or 'the same'}, or leave "
                "--model out, which takes the recorded one"
            )

    def check_model(self, config: ViTConfig, where: str) -> None:
        """Refuse a model that is another function of these weights than the one that was trained."""
        differ = self.differ(config.to_dict())
        if self.swap_norms is not None:
            # The config of a swapped model names the new norm, or the old one where none describes the mixture.
            to = self.swap_norms.partition(":")[0]
            differ = {name: pair for name, pair in differ.items() if name not in OF_SWAP}
            if config.norm not in (to, self.config.get("norm")):
                differ["norm"] = (to, config.norm)
        if differ:
            raise WeightsError(
                f"{where}: was trained with {_said(differ)}; build the model so, or give its tensors alone"
            )

    def differ(self, fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Fields whose value in the record makes another function of the same weights, with that and the given one."""
        free = (*_FREE, "image_size")
        return self._differ({name: value for name, value in fields.items() if name not in free})

    def _differ(self, fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        known = {} if self.vit is None else self.vit.to_dict()
        return {name: (old, fields[name]) for name, old in known.items() if fields.get(name, old) != old}

    def told(self, model: str, asked: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
        """What a name says otherwise than the record, beside the fields that are asked for."""
        name, own = _architecture(model), _architecture(self.name or model)
        if name not in MODELS and not model.startswith(TIMM):
            check_name(name, [*MODELS, *ALIASES], "model", "--model")
        if name not in MODELS or (self.vit is None and own not in MODELS):
            return {} if own == name else {"model": (self.name, model)}
        # A name alone does not tell the size of the images; the positions of the weights do.
        free = _FREE if self.vit is not None and self.name is not None else (*_FREE, "image_size")
        fields = model_config(name).to_dict()
        return replace(
            self, config=self.config if self.vit is not None else model_config(own).to_dict()
        )._differ({key: value for key, value in fields.items() if key not in (*free, *asked)})


def _said(differ: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} {theirs}, not {other}" for name, (theirs, other) in differ.items())


def _architecture(model: str) -> str:
    """A name without timm's prefix and its tag of weights; of an alias the whole name."""
    plain = model.removeprefix(TIMM).partition(".")[0] if model.startswith(TIMM) else model
    return ALIASES.get(plain, plain)


def record_beside(place: Path) -> TrainingRecord:
    """The record of a folder or a weights file, from its card, else from its run, else from the file; empty without."""
    file = place / "model.safetensors" if is_saved(place) else place
    card = file.with_name(f"{file.name}.json")
    if card.is_file() and not file.is_dir():
        return record_of_card(card)
    of_run = record_of_run(place if place.is_dir() else place.parent)
    return of_run or (record_in_file(place) if place.suffix == ".safetensors" else TrainingRecord())


def record_in_file(path: Path) -> TrainingRecord:
    """The record in a weights file itself, which stays when it is copied out of its run."""
    told = record_in_header(path, str(path))
    if not told:
        return TrainingRecord()
    record = _checked({**told, "name": told.get("model")}, path)
    for key in record.config:
        check_name(key, FIELDS, "option", f"{path}: config")
    return record


def is_saved(folder: Path) -> bool:
    """Whether a folder is one of `save_pretrained`: a run folder may hold an exported file with its card too."""
    own = (folder / "model.safetensors.json").is_file()
    return own and not any((folder / name).exists() for name in ("config.toml", "checkpoints"))


def record_of_card(path: Path) -> TrainingRecord:
    """The record in the card of an exported model."""
    card = read_json(path, ConfigError, MAX_CARD)
    if not isinstance(card.get("config"), dict):
        raise ConfigError(f"{path}: is not the card of an exported model; it has no config")
    return _checked({**card, "name": card.get("model"), "swap_norms": None}, path)


def record_of_pickle(told: dict[str, Any], where: str) -> TrainingRecord:
    """What a .pth says of its model; a name that is none here may be another library's word for the same model."""
    name = str(told.get("model", "")).lower()
    known = name in (*MODELS, *ALIASES)
    own = model_config(name) if known else None
    values: dict[str, Any] = {"name": name if known else None}
    if (changes := changed_by(told.get("arguments", {}), own, where)) and own is not None:
        # The number of classes is left to the weights.
        config = model_config(name, **changes).to_dict()
        values["config"] = {key: value for key, value in config.items() if key != "num_classes"}
    values["preprocessing"] = {key: value for key, value in told.items() if key not in ("model", "arguments")}
    return _checked(values, Path(where))


def record_of_run(folder: Path) -> TrainingRecord | None:
    """The record in config.toml and summary.json of the run that a folder belongs to, if it belongs to one."""
    places = (folder, folder.parent, folder.parent.parent)
    run = next((place for place in places if (place / "config.toml").is_file()), None)
    if run is None:
        return None
    path = run / "config.toml"
    table = read_toml(path, ConfigError)
    model = table.get("model")
    if not isinstance(model, dict):
        raise ConfigError(f"{path}: model must be a table; this is not the config of a run")
    for key in model:
        check_name(key, (*FIELDS, "name"), "option", f"{path}: [model]")
    config = {key: value for key, value in model.items() if key != "name"}
    config["num_classes"] = len(check_names(table.get("classes"), str(path), ConfigError))
    values = {**table, "config": config, "name": model.get("name"), "metrics": _metrics(run)}
    given = table.get("module")
    if given is not None and not (isinstance(given, list) and given and isinstance(given[0], int)):
        raise ConfigError(f"{path}: module must be a size and a hash; make the file again")
    return replace(_checked(values, path), run=run, module=None if given is None else given[0])


def _metrics(run: Path) -> dict[str, Any]:
    if not (run / "summary.json").is_file():
        return {}
    summary = read_json(run / "summary.json", ConfigError, MAX_CARD, DO_WITHOUT)
    return {key: summary[key] for key in ("status", "epoch", "best", "last", "test") if key in summary}


def of_weights(record: TrainingRecord, weights: Path) -> TrainingRecord:
    """The record of a run with only those metrics that are of these weights: the best, the last, or neither.

    The test split is evaluated with the last weights, and averaged weights (EMA) are the ones that are evaluated.
    """
    metrics, averaged = record.metrics, weights.with_name("ema.safetensors")
    best = metrics.get("best")
    ended = metrics.get("status") == "done"
    same = ended and isinstance(best, dict) and best.get("epoch") == metrics.get("epoch")
    kept = {"best": ("best",), "last": ("last", "test") if ended else ()}.get(weights.parent.name, ())
    if same and kept:
        kept = ("best", "last", "test")
    if weights != averaged and averaged.is_file():
        kept = ()
    known = {key: value for key, value in metrics.items() if key in ("status", "epoch", *kept)}
    return replace(record, metrics=known)


def _checked(values: dict[str, Any], path: Path) -> TrainingRecord:
    """The record in a card or a config.toml, every value of its type."""
    tables: dict[str, Any] = {key: values.get(key) or {} for key in TABLES}
    for key, value in tables.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {key} must be a table; make the file again")
    texts: dict[str, Any] = {key: values.get(key) for key in ("name", "data", "swap_norms")}
    for key, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{path}: {key} must be a text; make the file again")
    classes = values.get("classes")
    if classes is not None:
        classes = check_names(classes, str(path), ConfigError)
    return TrainingRecord(**tables, **texts, classes=classes)
