"""Recipes by name and from files. Importing this file does not import torch."""

from __future__ import annotations

import reprlib
import tomllib
import typing
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from fathoms.errors import ConfigError
from fathoms.models.config import FIELDS
from fathoms.reading import fault_of, read_toml
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
        if not Path(name).is_file():
            raise ConfigError(f"{name}: no such file; give a TOML file or one of `fathoms recipes`")
        table = read_toml(name, ConfigError)
    else:
        check_name(name, recipe_names(), "recipe", "train.recipe")
        file = resources.files("fathoms.train").joinpath("recipes", f"{name}.toml")
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    for key in table:
        check_name(key, (*RECIPE_FIELDS, "about", "model"), "option", name)
    if not isinstance(table.get("model", {}), dict):
        raise ConfigError(f"{name}: model is a table of switches; write it as [model]")
    texts = {"about": table.get("about", ""), "model.name": table.get("model", {}).get("name", "")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f"{name}: {key} is a text; write it in quotes")
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
        if wrong := fault_of(read, hint):
            raise ConfigError(f"{where}: {key} = {reprlib.repr(value)} {wrong}; mend the file")
        if typing.get_origin(hint) is Literal:
            check_name(str(read), typing.get_args(hint), "value", f"{where}: {key}")
        if isinstance(read, tuple):
            options[key] = tuple(float(number) for number in read)
        else:
            options[key] = float(read) if float in (hint, *typing.get_args(hint)) else read
    return options
