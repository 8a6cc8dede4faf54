"""The options that a recipe and the name of a model stand for. Importing this file does not import torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from fathoms.train.recipe.files import read_recipe, recipe_options

DEFAULT_MODEL = "vit_small_patch16_224"


class StartingPoint(NamedTuple):
    """The options that flags override.

    Args:
        model: Name of the model.
        options: Fields of Recipe.
        switches: Fields of ViTConfig that differ from those of the named model.
    """

    model: str
    options: dict[str, Any]
    switches: dict[str, Any]


def starting_point(recipe: str | None, model: str | None) -> StartingPoint:
    """The options of a recipe, None being the defaults, and of a model, None being the recipe's."""
    table: dict[str, Any] = {} if recipe is None else read_recipe(recipe)
    switches = dict(table.get("model", {}))
    own = switches.pop("name", None)
    name = model or own or DEFAULT_MODEL
    if name != own:
        # The switches of a recipe belong to its model; another model has its own.
        switches = {key: value for key, value in switches.items() if key == "drop_path"}
    return StartingPoint(name, recipe_options(table, str(recipe)), switches)
