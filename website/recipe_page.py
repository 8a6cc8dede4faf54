"""The page of the recipes, docs/recipes.md: each with its line, its options and its model."""

from __future__ import annotations

from typing import Any

from doc_format import table
from fathoms.training.recipe import DEFAULTS, read_recipe, recipe_names

DATA = {"digits": "", "cifar": " cifar10.npz"}
"""The data each recipe is for; ImageNet where nothing is said."""


def pages() -> dict[str, str]:
    """The text of the page, by its file name under docs/."""
    recipes = {name: read_recipe(name) for name in recipe_names()}
    rows = [
        [
            f"[`{name}`](#{name})",
            recipe["about"],
            DATA.get(name, " ImageNet").strip() or "the built-in digits",
        ]
        for name, recipe in recipes.items()
    ]
    lines = [
        "# Recipes",
        "",
        "A recipe is every option that decides how a model is trained, except the data. Flags override it, `none`",
        "switches an option off (`--aa none`), and `fathoms recipes NAME > mine.toml` is the start of your own: "
        "`fathoms train DATA --recipe mine.toml`.",
        "",
        "<!-- written by website/generate.py from src/fathoms/training/recipes/*.toml -->",
        "",
        table(["recipe", "about", "data"], rows),
        "",
    ]
    for name, recipe in recipes.items():
        lines += _recipe(name, recipe)
    return {"recipes.md": "\n".join(lines)}


def _recipe(name: str, recipe: dict[str, Any]) -> list[str]:
    model = recipe.pop("model", {})
    recipe.pop("about")
    option = "" if name == "digits" else f" --recipe {name}"
    changed = [
        [f"`{key}`", _shown(value), _shown(DEFAULTS[key])]
        for key, value in recipe.items()
        if value != DEFAULTS[key]
    ]
    own = ", ".join(f"`{key}={_shown(value)}`" for key, value in model.items())
    command = f"`fathoms train{DATA.get(name, ' imagenet/')}{option}`"
    return [
        *(f"## {name}", "", f"{command}{f'. Model: {own}' if own else ''}.", ""),
        *('<details markdown="1"><summary>Options that differ from the defaults</summary>', ""),
        table(["option", "value", "default without a recipe"], changed),
        *("", "</details>", ""),
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
