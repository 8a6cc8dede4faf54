"""Load a trained model from a run folder, a checkpoint folder, a weights file, an exported file or the Hub."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from fathoms.errors import ConfigError, WeightsError, flag_of
from fathoms.evaluate.exported_file import exported_file, file_of_card, open_exported
from fathoms.evaluate.preprocessing import Preprocessing
from fathoms.evaluate.training_record import TrainingRecord, of_weights, record_of_card, record_of_run
from fathoms.models import hub
from fathoms.models.build_timm import TIMM, build_timm, timm_classes, timm_preprocessing, timm_size
from fathoms.models.config import ViTConfig
from fathoms.models.overrides import AllFields
from fathoms.models.resolve import resolve_trained
from fathoms.models.safetensors_header import check_ending, check_header
from fathoms.models.vit import ViT
from fathoms.models.weights import (
    MisfitError,
    build_for,
    check_size,
    load_weights,
    put_weights,
    read_tensors,
)
from fathoms.models.zoo import model_config
from fathoms.surgery.inputs import image_shape


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with the record of its training; of a new one the record is empty.

    Args:
        model: A fathoms or a timm model, or an exported file as a model.
        name: Its name, "timm/NAME" for a timm model.
        config: The config it is built from; None for a timm model and for an exported file.
        image_size: Side of its images.
        in_channels: Channels of its images; further channels of the data are dropped.
        num_classes: Number of its outputs.
        preprocessing: Resize, crop and normalisation of its images, as recorded; where they are not, timm's for
            its models, else the defaults.
        classes: Names of the outputs; None where they are not recorded.
        recipe: How it was trained; empty where that is not recorded.
        metrics: What these weights achieved; empty where that is not recorded.
        data: What it was trained on.
        source: The weights file, or the Hub repository with the commit that was read.
        run: Its run folder, if it has one.
        trained: Whether its weights come from a file; `new_model` draws them.
        assumed: Whether the preprocessing is the default because nothing records it.
    """

    model: nn.Module
    name: str
    config: ViTConfig | None
    image_size: int
    in_channels: int
    num_classes: int
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None
    recipe: dict[str, Any]
    metrics: dict[str, Any]
    data: str | None
    source: str
    run: Path | None
    trained: bool = True
    assumed: bool = False


def weights_file(folder: Path, ema: bool) -> Path:
    """The weights file of a run or checkpoint folder: of the best epoch, averaged (EMA) where there is one."""
    places = [folder / "checkpoints" / "best", folder / "checkpoints" / "last", folder]
    for place in places:
        for name in ("ema.safetensors", "model.safetensors") if ema else ("model.safetensors",):
            if (place / name).is_file():
                return place / name
    # Those of a comparison are in its folder `cells`.
    runs = sorted(config.parent for at in ("*", "cells/*") for config in folder.glob(f"{at}/config.toml"))
    if runs:
        raise WeightsError(f"{folder}: is a folder of runs; give one of them, such as {runs[0]}")
    if (folder / "config.toml").is_file():
        raise WeightsError(f"{folder}: {_without_checkpoints(folder)}")
    raise WeightsError(
        f"{folder}: holds no weights; give a run folder, a checkpoint folder or a .safetensors file"
    )


def _without_checkpoints(run: Path) -> str:
    """Why a run has no weights, and what to do: a comparison deletes them, and a run may end before its first."""
    if run.parent.name in ("cells", "tuning") and (run.parent.parent / "plan.json").is_file():
        return (
            "the comparison kept no checkpoints of this run (--keep); "
            "compare again with --keep last and another --experiment"
        )
    return "this run has no checkpoint; give the training command again, or another run"


def _from_hub(checkpoint: str) -> tuple[Path, str, TrainingRecord]:
    """The weights of a repository, its name with the commit, and its card where it has one."""
    path, source = hub.fetch(checkpoint)
    try:
        card, _ = hub.fetch(source, hub.CARD)
    except hub.NoSuchFileError:
        return path, source, TrainingRecord()
    return path, source, record_of_card(card)


def _locate(checkpoint: str, ema: bool) -> tuple[Path, str, TrainingRecord]:
    """The weights file, its name for messages, and its record: from its card, else from its run."""
    path = Path(checkpoint)
    if path.is_dir() and _is_saved(path):
        path = path / hub.FILE
    elif path.is_dir():
        # The record first: a config that cannot be read explains more than weights that are not there.
        record = record_of_run(path) or TrainingRecord()
        weights = weights_file(path, ema)
        return weights, str(weights), of_weights(record, weights)
    elif resolve_trained(checkpoint).kind == "hub":
        return _from_hub(checkpoint)
    check_ending(path, str(path))
    card = path.with_name(f"{path.name}.json")
    if card.is_file():
        return path, str(path), record_of_card(card)
    return path, str(path), of_weights(record_of_run(path.parent) or TrainingRecord(), path)


def _is_saved(folder: Path) -> bool:
    """Whether a folder is one of `save_pretrained`: a run folder may hold an exported file with its card too."""
    own = (folder / hub.CARD).is_file()
    return own and not any((folder / name).exists() for name in ("config.toml", "checkpoints"))


def load_run(
    checkpoint: str | Path,
    model: str | None = None,
    *,
    ema: bool = True,
    trust_program: bool = False,
    **overrides: Unpack[AllFields],
) -> LoadedModel:
    """Load a trained model for inference, with its preprocessing, its class names and its record.

    Args:
        checkpoint: A run folder, a checkpoint folder, a folder of `save_pretrained`, a weights file, an exported file
            (.onnx, .pt2), the card of either (.json), or hf-hub:OWNER/NAME[@REVISION].
        model: Name of the model, "timm/NAME" for a timm model; None takes the name in the run or the card.
        ema: Whether averaged weights are preferred.
        trust_program: Whether a torch.export program (.pt2) may be opened, which can run code.
        **overrides: Fields of ViTConfig, for fathoms models.

    >>> import tempfile, torch
    >>> from fathoms import create_model, save_weights
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(create_model("vit_digits", num_classes=10), f"{folder}/digits.safetensors")
    ...     loaded = load_run(f"{folder}/digits.safetensors", "vit_digits")
    >>> loaded.model(torch.randn(2, loaded.in_channels, loaded.image_size, loaded.image_size)).shape
    torch.Size([2, 10])
    """
    checkpoint, fields = file_of_card(str(checkpoint)), dict(overrides)
    if (exported := exported_file(checkpoint)) is not None:
        return _load_exported(exported, model, fields, trust_program)
    weights, source, record = _locate(checkpoint, ema)
    name = model or record.name
    if name is not None and name.startswith(TIMM):
        built = _load_timm(name, weights, record, fields)
    else:
        built = _load_vit(checkpoint, model, weights, record, fields)
    config, shape = _shape(built, name)
    # Weights of timm without a record of their training are evaluated as timm does: mean and crop differ by model.
    recorded = record.preprocessing or ({} if config or record.recipe else timm_preprocessing(built))
    seen = Preprocessing.recorded(record.recipe, recorded).at(shape[0])
    kept = (seen, record.classes, record.recipe, record.metrics, record.data, source, record.run)
    assumed = not recorded and not record.recipe
    if isinstance(built, ViT):
        built.card = _card(name, None if assumed else seen, record.classes)
    return LoadedModel(built.eval(), name or "model", config, *shape, *kept, assumed=assumed)


def _card(
    name: str | None, preprocessing: Preprocessing | None, classes: tuple[str, ...] | None
) -> dict[str, Any]:
    """Entries of the card that a model carries; metrics belong to these weights alone and stay behind."""
    table = None if preprocessing is None else preprocessing.to_dict()
    known = {"model": name, "preprocessing": table, "classes": classes}
    return {key: value for key, value in known.items() if value is not None}


def new_model(
    name: str, seed: int = 0, *, flag: str = "--model", **overrides: Unpack[AllFields]
) -> LoadedModel:
    """A model of the zoo or of timm with random weights, as `load_run` gives a trained one.

    Args:
        name: A name of `list_models()`, or "timm/NAME".
        seed: Seed of the weights.
        flag: The flag that errors about a timm name begin with.
        **overrides: Fields of ViTConfig, for fathoms models.
    """
    fields = dict(overrides)
    if name.startswith(TIMM):
        classes = timm_classes(fields)
        torch.manual_seed(seed)
        built = build_timm(name, classes, flag=flag)
    else:
        wanted = model_config(name, **fields)
        torch.manual_seed(seed)
        built = ViT(wanted)
    config, shape = _shape(built, name)
    seen = Preprocessing.of({} if config else timm_preprocessing(built)).at(shape[0])
    return LoadedModel(
        built.eval(), name, config, *shape, seen, None, {}, {}, None, name, None, trained=False
    )


def _shape(model: Any, name: str | None) -> tuple[ViTConfig | None, tuple[int, int, int]]:
    """The config of a fathoms model, and image size, channels and outputs of any."""
    if isinstance(model, ViT):
        config = model.config
        return config, (config.image_size, config.in_channels, config.num_classes)
    outputs = int(getattr(model, "num_classes", 0))
    return None, (timm_size(str(name)), int(getattr(model, "in_chans", 3)), outputs)


def _load_exported(path: Path, model: str | None, overrides: dict[str, Any], trusted: bool) -> LoadedModel:
    """An exported file with its card; without one it has the default preprocessing and numbers for classes."""
    for name in [*overrides, *(["model"] if model is not None else [])]:
        raise ConfigError(f"{flag_of(name)}: {path.name} is built as it was exported; leave it out")
    built, record = open_exported(path, trusted)
    channels, size, _ = image_shape(built)
    seen = Preprocessing.recorded(record.recipe, record.preprocessing).at(size)
    # Next to a run's config it was exported from that run, whose carved split is then the one to measure on.
    run = path.parent if (path.parent / "config.toml").is_file() else None
    kept = (seen, record.classes, record.recipe, record.metrics, record.data, str(path), run)
    name, assumed = record.name or path.stem, not record.preprocessing and not record.recipe
    return LoadedModel(built.eval(), name, None, size, channels, built.num_classes, *kept, assumed=assumed)


def _load_vit(
    checkpoint: str, model: str | None, weights: Path, record: TrainingRecord, overrides: dict[str, Any]
) -> Any:
    """A fathoms model with its weights."""
    if model is not None:
        config = model_config(model, **{**_outputs(weights, record), **overrides})
    elif record.config:
        config = ViTConfig().replace(**record.config).replace(**overrides)
    else:
        raise ConfigError(f"{checkpoint}: a weights file alone does not say which model it is; give --model")
    vit = _swapped(build_for(config, weights), record.swap_norms)
    try:
        load_weights(vit, weights)
    except MisfitError as error:
        raise _without_head_flags(error, weights, overrides) from error
    return vit


def _without_head_flags(error: MisfitError, weights: Path, overrides: dict[str, Any]) -> MisfitError:
    """The error for another number of classes: a new classifier is started in training, not here."""
    if set(error.settings) != {"num_classes"}:
        return error
    held, wanted = error.settings["num_classes"]
    remedy = "leave --num-classes out" if "num_classes" in overrides else "they do not belong together"
    other = MisfitError(f"{weights} does not fit the model: num_classes {held} against {wanted}; {remedy}")
    other.plain, other.settings = error.plain, error.settings
    return other


def _outputs(weights: Path, record: TrainingRecord) -> dict[str, Any]:
    """The number of classes: of the record, or else of the weights; a model's name does not say it."""
    if record.classes is not None:
        return {"num_classes": len(record.classes)}
    head = check_header(weights, str(weights)).get("head.weight", ())
    return {"num_classes": head[0]} if len(head) == 2 else {}


def _load_timm(name: str, weights: Path, record: TrainingRecord, overrides: dict[str, Any]) -> nn.Module:
    """A timm model with its weights."""
    classes = timm_classes({"num_classes": record.config.get("num_classes"), **overrides})
    if classes is not None and (not isinstance(classes, int) or not 0 < classes <= 1_000_000):
        raise ConfigError(f"{weights}: num_classes={classes!r} must be a whole number from 1 to 1,000,000")
    held = sum(math.prod(shape) for shape in check_header(weights, str(weights)).values())
    with torch.device("meta"):
        described = build_timm(name, classes)
    check_size(described, held, weights)
    built = _swapped(build_timm(name, classes), record.swap_norms)
    put_weights(built, read_tensors(weights, str(weights)), str(weights))
    return built


def _swapped(model: nn.Module, to: str | None) -> Any:
    """A model whose norms were swapped before it was trained, swapped again."""
    if to is not None:
        from fathoms.surgery.swap.swap import swap_norms

        swap_norms(model, to, how="reset")
    return model
