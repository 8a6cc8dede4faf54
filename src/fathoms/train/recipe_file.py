"""Recipes by name and from files. Importing this file does not import torch."""

from __future__ import annotations

import tomllib
import types
import typing
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fathoms.errors import ConfigError
from fathoms.models.config import FIELDS
from fathoms.registry import check_name
from fathoms.train.recipe import DEFAULTS, RECIPE_FIELDS, Recipe
from fathoms.train.usage import refuse_unused


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    files = resources.files("fathoms.train").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The table of a recipe: one of `recipe_names()`, or the path of a TOML file.

    Its keys are fields of Recipe at the top, and fields of ViTConfig under [model].
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"{name}: no such file; give a TOML file or one of `fathoms recipes`")
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        check_name(name, recipe_names(), "recipe", "train.recipe")
        text = (
            resources.files("fathoms.train").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")
        )
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{name}: no readable TOML ({' '.join(str(error).split())}); mend the file"
        ) from error
    for key in table:
        check_name(key, (*RECIPE_FIELDS, "about", "model"), "option", name)
    if not isinstance(table.get("model", {}), dict):
        raise ConfigError(f"{name}: model is a table of switches; write it as [model]")
    for key in table.get("model", {}):
        check_name(key, (*FIELDS, "name"), "option", f"{name}: [model]")
    options = recipe_options(table, name)
    refuse_unused(SimpleNamespace(**{**DEFAULTS, **options}), options)
    return table


def recipe_options(table: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of Recipe in a table that was read from TOML, each of its own type."""
    hints = typing.get_type_hints(Recipe)
    options: dict[str, Any] = {}
    for key, value in table.items():
        if key not in RECIPE_FIELDS:
            continue
        hint, read = hints[key], tuple(value) if isinstance(value, list) else value
        if not fits(read, hint):
            wanted = str(getattr(hint, "__name__", hint)).replace("typing.", "")
            raise ConfigError(f"{where}: {key} = {value!r} is no {wanted}; mend the file")
        if isinstance(read, tuple):
            options[key] = tuple(float(number) for number in read)
        else:
            options[key] = float(read) if float in (hint, *typing.get_args(hint)) else read
    return options


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from TOML is what a field's annotation says; a whole number is also a float.

    >>> fits(3, float), fits("3", float), fits((0.9, 0.99), tuple[float, float] | None)
    (True, False, True)
    """
    kind, inside = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return any(fits(value, option) for option in inside)
    if kind is typing.Literal:
        return value in inside
    if kind is tuple:
        return isinstance(value, tuple) and len(value) == len(inside) and all(map(fits, value, inside))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
