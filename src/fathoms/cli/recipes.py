"""List the training recipes, or show one as TOML."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass

import tyro

from fathoms.train.recipe.files import read_recipe, recipe_names
from fathoms.train.record.toml import to_toml

EXAMPLES = """
fathoms recipes
fathoms recipes cait_400
fathoms recipes cait_400 > mine.toml
"""


@dataclass(frozen=True)
class Args:
    """Options of `fathoms recipes`."""

    name: tyro.conf.Positional[str | None] = None
    """A recipe, or a TOML file. Default: list all recipes."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    """Print the list, or one recipe."""
    if args.name is not None:
        table = read_recipe(args.name)
        print(json_format.dumps(table) if args.json else to_toml(table), end="\n" if args.json else "")
        return 0
    about = {name: read_recipe(name)["about"] for name in recipe_names()}
    if args.json:
        print(json_format.dumps(about))
        return 0
    for name, text in about.items():
        print(f"{name:<24}{text}")
    return 0
