"""Save a model to a folder or the Hub with its card, and build it again from there; nothing is executed.

The card holds model, config, preprocessing and class names as plain data.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from fathoms.errors import ConfigError, WeightsError
from fathoms.files import write_atomic
from fathoms.models import model_sources
from fathoms.models.config import FIELDS, OF_TRAINING, TOLD_BY_WEIGHTS, ViTConfig
from fathoms.models.model_sources import resolve
from fathoms.models.weights import (
    Described,
    MisfitError,
    build_for,
    load_weights,
    said,
    save_weights,
)
from fathoms.registry import check_name
from fathoms.untrusted import MAX_CARD, check_names, read_json, sha256_of

STEPS = ("crop_pct", "interpolation", "mean", "std")
"""Entries of the table of preprocessing that evaluation reads."""


def card_entries(model: Described, preprocessing: Any, classes: Sequence[str] | None) -> dict[str, Any]:
    """The card without file and hash; a preprocessing or class names that nothing says are null in it.

    Args:
        model: With what is known of it in `model.card`.
        preprocessing: A table or a `Preprocessing` that replaces the known one.
        classes: Names that replace the known ones.
    """
    where = "save_pretrained"
    known = model.card
    if preprocessing is None:
        table = known.get("preprocessing")
    else:
        table = dict(preprocessing if isinstance(preprocessing, Mapping) else preprocessing.to_dict())
        for name in table:
            check_name(name, STEPS, "step of preprocessing", where)
        table = _checked(table, f"{where}: preprocessing")
    names = known.get("classes") if classes is None else check_names(list(classes), where, ConfigError)
    if names is not None and len(names) != model.config.num_classes:
        raise ConfigError(
            f"{where}: {len(names)} classes are named and the model has {model.config.num_classes}; give classes= that "
            "fit"
        )
    return {
        "model": known.get("model", "vit"),
        "config": model.config.to_dict(),
        "preprocessing": table,
        "classes": None if names is None else list(names),
    }


def kept_entries(card: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Entries of a card that a model keeps, checked: the card may be a stranger's."""
    kept: dict[str, Any] = {}
    if isinstance(card.get("model"), str):
        kept["model"] = card["model"]
    table = card.get("preprocessing")
    if table is not None:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}: preprocessing must be a table; make the file again")
        kept["preprocessing"] = _checked({name: table.get(name) for name in STEPS}, where)
    if card.get("classes") is not None:
        kept["classes"] = check_names(card["classes"], where, ConfigError)
    return kept


def _checked(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The steps that are given, each of its type: they are written into a card that others read."""
    given = {name: value for name, value in table.items() if value is not None}
    for name in ("mean", "std"):
        values = given.get(name, (1.0, 1.0, 1.0))
        fits = isinstance(values, Sequence) and len(values) == 3 and all(map(_is_number, values))
        if not fits or (name == "std" and min(values) <= 0):
            raise ConfigError(f"{where}: {name} must be three numbers (std: above zero); correct it")
    crop = given.get("crop_pct", 1.0)
    if not _is_number(crop) or crop <= 0:
        raise ConfigError(f"{where}: crop_pct must be a number above zero; correct it")
    check_name(given.get("interpolation", "bicubic"), ("bilinear", "bicubic"), "interpolation", where)
    return {name: list(value) if name in ("mean", "std") else value for name, value in given.items()}


def _is_number(value: Any) -> bool:
    # A comparison, unlike math.isfinite, also takes an integer of a thousand digits.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


_TAKES = "a folder of save_pretrained, a .safetensors file with its card, or hf-hub:OWNER/NAME[@REVISION]"


def check_described(model: Described) -> None:
    """Refuse a model that its config would not build again: such as a folded one."""
    with torch.device("meta"):
        twin = type(model)(model.config)
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
            "save_pretrained: no ViTConfig describes this model (folded or swapped in part), so it could "
            "not be loaded again; save it before that, or export it to ONNX (`fathoms export --fold`)"
        )


def _check_function(recorded: dict[str, Any], source: str | Path, overrides: dict[str, Any]) -> None:
    """Refuse overrides that fit the weights by shape and make another function of them, such as other heads."""
    for name, value in overrides.items():
        if name not in (*TOLD_BY_WEIGHTS, *OF_TRAINING, "image_size") and value != recorded[name]:
            raise WeightsError(
                f"from_pretrained: {name}={value!r}: {source} holds the weights of another model ({name} "
                f"{recorded[name]} against {value}); leave it out"
            )


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
        weights = found.path / model_sources.FILE
        for name in (model_sources.FILE, model_sources.CARD):
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
    weights, exact = model_sources.fetch(name)
    try:
        return weights, model_sources.fetch(exact, model_sources.CARD)[0]
    except model_sources.NoSuchFileError as error:
        raise WeightsError(
            f"from_pretrained: {name}: holds no {model_sources.CARD} that says the model; load it with "
            f"fathoms.create_model(NAME, weights={name!r})"
        ) from error


# Not typing.Self: the run-time checker of the tests decorates methods one by one, and cannot know its class.
Model = TypeVar("Model", bound=Described)


class Pretrained(Described):
    """A model that is saved with its card to a folder or the Hub, and built from there."""

    @classmethod
    def from_pretrained(cls: type[Model], source: str | Path, **overrides: Any) -> Model:
        """A model from what `save_pretrained` or `fathoms export --format safetensors` wrote, here or on the Hub.

        Args:
            source: The folder, the weights file with its card next to it, or hf-hub:OWNER/NAME[@REVISION].
            **overrides: Fields of ViTConfig that leave the weights as they are, such as image_size or drop_path.
        """
        for name in overrides:
            check_name(name, FIELDS, "field of ViTConfig", "from_pretrained")
        weights, path = _files(str(source))
        card = read_json(path, WeightsError, MAX_CARD)
        config = card.get("config")
        if not isinstance(config, dict):
            raise ConfigError(f"{source}: its card holds no config, so the model is not known")
        recorded = ViTConfig().replace(**config)
        _check_function(recorded.to_dict(), source, overrides)
        model = build_for(cls, recorded.replace(**overrides), weights)
        try:
            load_weights(model, weights)
        except MisfitError as error:
            raise _misfit(error, source, overrides) from error
        model.card = kept_entries(card, str(path))
        return model.eval()

    def save_pretrained(
        self, folder: str | Path, *, preprocessing: Any = None, classes: Sequence[str] | None = None
    ) -> Path:
        """Write `model.safetensors` and its card, as `fathoms export` names them; returns the weights file.

        Args:
            folder: Made if it is not there; files of an earlier save are replaced.
            preprocessing: `crop_pct`, `interpolation`, `mean` and `std` of its images, as a table or a
                `Preprocessing`; None takes those that `load_run` or `from_pretrained` found.
            classes: Names of the outputs; None takes those that were found.
        """
        check_described(self)
        entries = card_entries(self, preprocessing, classes)
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
        weights = folder / model_sources.FILE
        save_weights(self, weights)
        card = {"file": model_sources.FILE, "sha256": sha256_of(weights), **entries}
        write_atomic(folder / model_sources.CARD, (json.dumps(card, indent=2) + "\n").encode())
        return weights

    def push_to_hub(
        self,
        repo: str,
        *,
        public: bool = False,
        preprocessing: Any = None,
        classes: Sequence[str] | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes to OWNER/NAME on the Hub; returns hf-hub:OWNER/NAME@COMMIT."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, preprocessing=preprocessing, classes=classes)
            files = {name: Path(folder) / name for name in (model_sources.FILE, model_sources.CARD)}
            return model_sources.push(repo.removeprefix(model_sources.PREFIX), files, public=public)
