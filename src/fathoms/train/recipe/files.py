"""Read recipes by name or from TOML files. Importing this file does not import torch."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fathoms.errors import ConfigError
from fathoms.files.untrusted import read_toml
from fathoms.models.config import FIELDS
from fathoms.names.config_checks import OFF_WORDS, check_field
from fathoms.names.registry import check_name
from fathoms.train.recipe.recipe import DEFAULTS, RECIPE_FIELDS, Recipe
from fathoms.train.recipe.unused import refuse_unused


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    files = resources.files("fathoms.train").joinpath("recipe").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The table of a recipe: one of `recipe_names()`, or the path of a TOML file.

    Its keys are fields of Recipe at the top, and fields of ViTConfig under [model].
    """
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise ConfigError(f"{name}: no such file; give a TOML file or a name from `fathoms recipes`")
        table = read_toml(name, ConfigError)
    else:
        check_name(name, recipe_names(), "recipe", "--recipe")
        file = resources.files("fathoms.train").joinpath("recipe", f"{name}.toml")
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    for key in table:
        check_name(key, (*RECIPE_FIELDS, "about", "model"), "option", name)
    if not isinstance(table.get("model", {}), dict):
        raise ConfigError(f"{name}: model must be a table; write [model] and its fields below")
    for key, value in (
        ("about", table.get("about", "")),
        ("[model] name", table.get("model", {}).get("name", "")),
    ):
        if not isinstance(value, str):
            raise ConfigError(f"{name}: {key} must be a string; write it in quotes")
    for key in table.get("model", {}):
        check_name(key, (*FIELDS, "name"), "option", f"{name}: [model]")
    options = recipe_options(table, name)
    refuse_unused(SimpleNamespace(**{**DEFAULTS, **options}), options)
    return table


def recipe_options(table: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of Recipe in a table read from TOML, each checked against its type."""
    options = {key: value for key, value in table.items() if key not in ("about", "model")}
    off = Recipe.can_be_off()
    for key, value in options.items():
        check_name(key, RECIPE_FIELDS, "option", where)
        if key in off and isinstance(value, str) and value in OFF_WORDS:
            options[key] = None
            continue
        check_field(Recipe, key, value, f"{where}: --", ConfigError)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
