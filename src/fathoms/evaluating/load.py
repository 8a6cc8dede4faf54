"""Load a trained model from a run folder, a checkpoint folder, a weights file, an exported file or the Hub."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fathoms.errors import ConfigError, WeightsError, flag_of
from fathoms.evaluating.onnx_model import exported_file, file_of_card, open_exported
from fathoms.evaluating.preprocessing import Preprocessing
from fathoms.files import missing
from fathoms.models import model_sources
from fathoms.models.build_timm import TIMM, build_timm, timm_classes, timm_size
from fathoms.models.config import ViTConfig
from fathoms.models.model_sources import resolve_trained
from fathoms.models.pickled_weights import as_safetensors, is_pickled
from fathoms.models.training_record import (
    TrainingRecord,
    is_saved,
    of_weights,
    record_beside,
    record_in_file,
    record_of_card,
    record_of_pickle,
)
from fathoms.models.vit import ViT
from fathoms.models.weight_names import unprefixed, unwrap
from fathoms.models.weights import MisfitError, build_for, check_size, load_weights, put_weights, read_tensors
from fathoms.models.weights_file import check_ending, check_header
from fathoms.models.zoo import data_config, model_config
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
        assumed: Where its preprocessing comes from if nothing records it; "" if it is recorded.
        notes: Lines for the user on what was taken.
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
    assumed: str = ""
    notes: tuple[str, ...] = ()


def weights_file(folder: Path, ema: bool | None = None) -> Path:
    """The weights file of a run or checkpoint folder: of the best epoch, averaged (EMA) where there is one.

    Args:
        folder: A run or a checkpoint.
        ema: True takes nothing but an average, False nothing but the plain weights.
    """
    places = [folder / "checkpoints" / "best", folder / "checkpoints" / "last", folder]
    names = {
        None: ("ema.safetensors", "model.safetensors"),
        True: ("ema.safetensors",),
        False: ("model.safetensors",),
    }
    for place in places:
        for name in names[ema]:
            if (place / name).is_file():
                return place / name
        if ema and (place / "model.safetensors").is_file():
            raise WeightsError(f"--use-ema: {place}: holds no averaged weights; leave it out")
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


@dataclass(frozen=True)
class Found:
    """The weights of a checkpoint.

    Args:
        weights: Their safetensors file.
        source: Its name for messages.
        record: Of its card, else of its run.
        note: A line for the user; "" if there is nothing to say.
    """

    weights: Path
    source: str
    record: TrainingRecord
    note: str = ""


def _from_hub(checkpoint: str) -> Found:
    """The weights of a repository, its name with the commit, and its card where it has one."""
    path, source = model_sources.fetch(checkpoint)
    try:
        card, _ = model_sources.fetch(source, model_sources.CARD)
    except model_sources.NoSuchFileError:
        return Found(path, source, record_in_file(path))
    return Found(path, source, record_of_card(card))


@contextmanager
def found(checkpoint: str | Path, ema: bool | None = None) -> Iterator[Found]:
    """The weights and the record of a checkpoint; a .pth is a safetensors file for the length of the block."""
    path = Path(checkpoint)
    if is_pickled(path):
        with as_safetensors(path, ema) as (weights, converted, line):
            yield Found(weights, str(path), record_of_pickle(converted.told, str(path)), line)
    else:
        yield _locate(str(checkpoint), ema)


def _locate(checkpoint: str, ema: bool | None) -> Found:
    path = Path(checkpoint)
    if path.is_dir() and is_saved(path):
        path = path / model_sources.FILE
    elif path.is_dir():
        # The record first: a config that cannot be read explains more than weights that are not there.
        record = record_beside(path)
        weights = weights_file(path, ema)
        return Found(weights, str(weights), of_weights(record, weights))
    elif ema:
        raise WeightsError(f"--use-ema: {checkpoint}: is one set of weights; leave it out")
    elif resolve_trained(checkpoint).kind == "hub":
        return _from_hub(checkpoint)
    check_ending(path, str(path))
    record = record_beside(path)
    return Found(path, str(path), record if record.run is None else of_weights(record, path))


def load_run(
    checkpoint: str | Path,
    model: str | None = None,
    *,
    ema: bool | None = None,
    **overrides: Any,
) -> LoadedModel:
    """Load a trained model for inference, with its preprocessing, its class names and its record.

    Args:
        checkpoint: A run folder, a checkpoint folder, a folder of `save_pretrained`, a weights file (.safetensors, or
            .pth, which another process converts without running code out of it), an exported .onnx file, the card of
            either (.json), or hf-hub:OWNER/NAME[@REVISION].
        model: Name of the model, "timm/NAME" for a timm model; None takes the recorded one, and a name that
            contradicts the record is an error.
        ema: Averaged weights (True) or plain ones (False); None takes a run's averaged ones where they exist, and a
            .pth file's plain ones.
        **overrides: Fields of ViTConfig, for fathoms models; those that contradict the record are an error.

    >>> import tempfile, torch
    >>> from fathoms import create_model, save_weights
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(create_model("vit_digits", num_classes=10), f"{folder}/digits.safetensors")
    ...     loaded = load_run(f"{folder}/digits.safetensors", "vit_digits")
    >>> loaded.model(torch.randn(2, loaded.in_channels, loaded.image_size, loaded.image_size)).shape
    torch.Size([2, 10])
    """
    # The system refuses to look at a longer name.
    if len(str(checkpoint)) > 4096:
        raise WeightsError(missing(checkpoint, "give a run folder or a weights file"))
    checkpoint, fields = file_of_card(str(checkpoint)), dict(overrides)
    if (exported := exported_file(checkpoint)) is not None:
        return _load_exported(exported, model, fields)
    with found(checkpoint, ema) as place:
        return _load(checkpoint, place, model, fields)


def _load(checkpoint: str, place: Found, model: str | None, fields: dict[str, Any]) -> LoadedModel:
    """The model of a checkpoint's weights."""
    record, notes = place.record, [place.note] if place.note else []
    name = model or record.name
    if record.module is not None:
        raise ConfigError(
            f"{checkpoint}: its model {record.name} is a module of Python code; give that to fathoms.train again"
        )
    if name is not None and name.startswith(TIMM):
        # A misspelt name is answered with the nearest, before anything else.
        timm_size(name)
    record.check(model, fields, checkpoint)
    if name is not None and name.startswith(TIMM):
        built = _load_timm(name, place.weights, record, fields)
    else:
        config, told = _config(checkpoint, name, place.weights, record, fields)
        built = _load_vit(config, place.weights, record, fields)
        notes += told
    _refuse_lost(built, place.source)
    config, shape = _shape(built, name)
    # Weights without a record of their training are evaluated as their model's authors do: mean and crop differ.
    own = {} if record.recipe else data_config(name)
    seen = Preprocessing.of({**record.recipe, **own, **record.preprocessing}).at(shape[0])
    assumed = (
        ""
        if record.recipe or "mean" in record.preprocessing
        else f"as {name} has it"
        if own
        else "by default"
    )
    if isinstance(built, ViT):
        built.card = _card(name, None if assumed == "by default" else seen, record.classes)
    kept = (seen, record.classes, record.recipe, record.metrics, record.data, place.source, record.run)
    return LoadedModel(
        built.eval(), name or "model", config, *shape, *kept, assumed=assumed, notes=tuple(notes)
    )


def _card(
    name: str | None, preprocessing: Preprocessing | None, classes: tuple[str, ...] | None
) -> dict[str, Any]:
    """Entries of the card that a model carries; metrics belong to these weights alone and stay behind."""
    table = None if preprocessing is None else preprocessing.to_dict()
    known = {"model": name, "preprocessing": table, "classes": classes}
    return {key: value for key, value in known.items() if value is not None}


def new_model(name: str, seed: int = 0, *, flag: str = "--model", **overrides: Any) -> LoadedModel:
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
    seen = Preprocessing.of(data_config(name)).at(shape[0])
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


def _load_exported(path: Path, model: str | None, overrides: dict[str, Any]) -> LoadedModel:
    """An exported file with its card; without one it has the default preprocessing and numbers for classes."""
    for name in [*overrides, *(["model"] if model is not None else [])]:
        raise ConfigError(f"{flag_of(name)}: {path.name} is built as it was exported; leave it out")
    built, record = open_exported(path)
    channels, size, _ = image_shape(built)
    seen = Preprocessing.of({**record.recipe, **record.preprocessing}).at(size)
    # Next to a run's config it was exported from that run, whose carved split is then the one to measure on.
    run = path.parent if (path.parent / "config.toml").is_file() else None
    kept = (seen, record.classes, record.recipe, record.metrics, record.data, str(path), run)
    assumed = "" if record.preprocessing or record.recipe else "by default"
    name = record.name or path.stem
    return LoadedModel(built.eval(), name, None, size, channels, built.num_classes, *kept, assumed=assumed)


def _config(
    checkpoint: str, name: str | None, weights: Path, record: TrainingRecord, overrides: dict[str, Any]
) -> tuple[ViTConfig, list[str]]:
    """The config of a fathoms model, recorded or of its name, and lines on what else was taken."""
    # The record of a .pth is that of its arguments, which leave to the weights what the shapes of these say.
    if record.vit is not None and "num_classes" in record.config:
        return record.vit.replace(**overrides), []
    if name is None:
        raise ConfigError(f"{checkpoint}: a weights file alone does not say which model it is; give --model")
    held = _held(weights)
    if record.classes is not None:
        held["num_classes"] = len(record.classes)
    fields = {key: held[key] for key in held.keys() - {"grid"}} | overrides
    config = model_config(name, **fields) if record.vit is None else record.vit.replace(**fields)
    size = held.get("grid", config.grid) * config.patch_size
    if size == config.image_size or "image_size" in overrides:
        return config, []
    line = (
        f"{checkpoint}: its positions are of {size}-pixel images, which are taken; --image-size changes that"
    )
    return config.replace(image_size=size), [line]


def _held(weights: Path) -> dict[str, int]:
    """What the shapes of a weights file say and the name of a model does not: outputs, and the grid of positions."""
    shapes = {unprefixed(key): shape for key, shape in check_header(weights, str(weights)).items()}
    held = {}
    if len(head := shapes.get("head.weight", ())) == 2:
        held["num_classes"] = head[0]
    if table := shapes.get("position.table") or shapes.get("pos_embed", ())[1:]:
        # Without the class token's position, which timm keeps in front of the others.
        held["grid"] = math.isqrt(table[0])
    return held


def _load_vit(config: ViTConfig, weights: Path, record: TrainingRecord, overrides: dict[str, Any]) -> ViT:
    vit = _swapped(build_for(ViT, config, weights), record.swap_norms)
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


def _load_timm(name: str, weights: Path, record: TrainingRecord, overrides: dict[str, Any]) -> nn.Module:
    classes = timm_classes({"num_classes": record.config.get("num_classes"), **overrides})
    if classes is not None and (not isinstance(classes, int) or not 0 < classes <= 1_000_000):
        raise ConfigError(f"{weights}: num_classes={classes!r} must be a whole number from 1 to 1,000,000")
    shapes = {unprefixed(key): shape for key, shape in check_header(weights, str(weights)).items()}
    if classes is None and len(head := shapes.get("head.weight", shapes.get("fc.weight", ()))) == 2:
        classes = head[0]
    with torch.device("meta"):
        described = build_timm(name, classes)
    check_size(described, sum(map(math.prod, shapes.values())), weights)
    built = _swapped(build_timm(name, classes), record.swap_norms)
    put_weights(built, unwrap(read_tensors(weights, str(weights))), str(weights))
    return built


def _refuse_lost(model: nn.Module, source: str) -> None:
    """Refuse values that are not finite, in the file or once they are cast to the model's dtype."""
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not value.isfinite().all():
            raise WeightsError(f"{source}: {name} holds values that are not finite; load other weights")


def _swapped(model: nn.Module, to: str | None) -> Any:
    """A model whose norms were swapped before it was trained, swapped again."""
    if to is not None:
        from fathoms.surgery.swap import swap_norms

        swap_norms(model, to, how="reset")
    return model
