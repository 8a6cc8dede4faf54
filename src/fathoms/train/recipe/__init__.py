"""Recipes: the training options under timm's names, the files they are read from, and the check for unused ones."""

from fathoms.train.recipe.files import read_recipe, recipe_names
from fathoms.train.recipe.recipe import Recipe

__all__ = ["Recipe", "read_recipe", "recipe_names"]
