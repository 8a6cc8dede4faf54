"""Read the record of a model's training from its run folder or its card, with every value checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError
from fathoms.files.untrusted import MAX_CARD, check_names, read_json, read_toml
from fathoms.models.config import FIELDS
from fathoms.names.registry import check_name

DO_WITHOUT = (
    "remove the file: the weights are not in it, and giving the training command again writes it anew"
)
"""Remedy for a damaged summary of a run."""
TABLES = ("config", "recipe", "preprocessing", "metrics")


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


def record_of_card(path: Path) -> TrainingRecord:
    """The record in the card of an exported model."""
    card = read_json(path, ConfigError, MAX_CARD)
    if not isinstance(card.get("config"), dict):
        raise ConfigError(f"{path}: is not the card of an exported model; it has no config")
    return _checked({**card, "name": card.get("model"), "swap_norms": None}, path)


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
    return replace(_checked(values, path), run=run)


def _metrics(run: Path) -> dict[str, Any]:
    if not (run / "summary.json").is_file():
        return {}
    summary = current_summary(read_json(run / "summary.json", ConfigError, MAX_CARD, DO_WITHOUT))
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


def current_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary.json of any version as today's: before version 2 the best epoch was counted from 0."""
    best = summary.get("best")
    if "version" in summary or not isinstance(best, dict) or not isinstance(best.get("epoch"), int):
        return summary
    return {**summary, "best": {**best, "epoch": best["epoch"] + 1}}


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
    if tables["config"].get("drop_path") == 0:
        # Earlier versions took a schedule without a drop-path, and it changed nothing.
        tables["config"] = {k: v for k, v in tables["config"].items() if k != "drop_path_schedule"}
    return TrainingRecord(**tables, **texts, classes=classes)
