"""The card that `save_pretrained` writes: model, config, preprocessing and class names, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fathoms.errors import ConfigError
from fathoms.files.untrusted import check_names
from fathoms.names.registry import check_name

if TYPE_CHECKING:
    from fathoms.models.vit import ViT

STEPS = ("crop_pct", "interpolation", "mean", "std")
"""Entries of the table of preprocessing that evaluation reads."""


def card_entries(model: ViT, preprocessing: Any, classes: Sequence[str] | None) -> dict[str, Any]:
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
    if names is not None and len(names) != model.num_classes:
        raise ConfigError(
            f"{where}: {len(names)} classes are named and the model has {model.num_classes}; give classes= that fit"
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
