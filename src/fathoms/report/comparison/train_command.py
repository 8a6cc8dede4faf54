"""The command that trains one arm of a comparison alone: flags for all that its plan sets and a recipe does not."""

from __future__ import annotations

import shlex
import typing
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from fathoms.errors import FathomsError, flag_words
from fathoms.models.build_timm import TIMM
from fathoms.models.config import ViTConfig
from fathoms.models.zoo import model_config
from fathoms.names.config_checks import OFF_WORDS, takes_off
from fathoms.report.comparison.arms import ArmView
from fathoms.report.comparison.files import ComparisonRecord
from fathoms.report.comparison.tuning import tuned_arms
from fathoms.report.quantities import shown
from fathoms.report.run.files import table
from fathoms.train.identity import SPEED, completed
from fathoms.train.recipe.files import recipe_names
from fathoms.train.recipe.recipe import DEFAULTS, Recipe
from fathoms.train.recipe.starting_point import starting_point
from fathoms.train.recipe.unused import unused

Settings = dict[str, Any]

NOT_FLAGS = ("data", "model", "seed", "config", "recipe")
"""Parts of a run's identity that are not options of it."""


def train_command(arm: ArmView, comparison: ComparisonRecord) -> str:
    """The command, quoted for a shell; empty for runs that no comparison made, and where flags cannot say it all.

    Among the recipes of the package it begins with the one that leaves the fewest flags to give.
    """
    plan = comparison.plan
    if not table(plan.get("arms")):
        return ""
    options = dict(arm.options)
    tuned = table(tuned_arms(comparison.tuning).get(arm.name, {}).get("best"))
    options |= {str(name): shown(value) for name, value in tuned.items()}
    data = plan.get("data")
    # A comparison of the digits has no path, and so begins with their recipe.
    default = "digits" if data == "digits" else None
    recipes = [default, *(name for name in recipe_names() if name != default)]
    found = [
        words if name == default else ["--recipe", str(name), *words]
        for name in recipes
        if (words := _words(name, arm.name, options, plan)) is not None
    ]
    if not found:
        return ""
    return shlex.join(["fathoms", "train", *([] if default else [str(data)]), *min(found, key=len)])


def _words(
    recipe: str | None, arm: str, options: Mapping[str, str], plan: Mapping[str, Any]
) -> list[str] | None:
    """The words after a recipe for one arm, the recipe's own first; None where they cannot describe the run."""
    base = table(plan.get("base"))
    try:
        identity = _merged(base, table(table(plan.get("own")).get(arm)))
        model = options.get("model") or identity["model"]
        start = starting_point(recipe, model)
        wanted = _wanted(identity, plan)
        words = []
        if model != starting_point(recipe, None).model and "model" not in options:
            words += ["--model", model]
        given = _differing(Recipe.join(start.options, {}).to_dict(), wanted["recipe"], options, Recipe)
        idle = unused(SimpleNamespace(**{**DEFAULTS, **wanted["recipe"], **_values(options)}))
        given = {name: value for name, value in given.items() if name not in idle}
        if not str(model).startswith(TIMM):
            ready = model_config(model, **start.switches).to_dict()
            given |= _differing(ready, wanted["config"], options, ViTConfig)
        given |= {
            name: value for name, value in identity.items() if name not in NOT_FLAGS and value is not None
        }
    except (FathomsError, KeyError, TypeError, ValueError, AttributeError):
        # A plan that is damaged, or names what this release does not have.
        return None
    rest = {name: value for name, value in given.items() if name not in options}
    if any(value is _CANNOT for value in rest.values()):
        return None
    return words + [
        word for each in (rest, options) for name in each for word in flag_words(name, each[name])
    ]


_CANNOT = object()
"""In the place of a value that no flag gives."""


def _wanted(identity: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Settings]:
    """Fields of Recipe and of ViTConfig as the plan has them; those that it does not tell are left out."""
    full = completed(identity)
    asked, recipe = identity["recipe"], dict(full["recipe"])
    recipe |= {name: asked.get(name) or "auto" for name in SPEED if name in asked and name != "amp"}
    if "amp" in asked:
        # Without mixed precision it is either not asked for, or --precision says so.
        recipe["amp"] = True if asked["amp"] else None
    wanted = {"recipe": recipe, "config": dict(full["config"] or {})}
    if "own" not in plan:
        # Plans of before it do not say what an arm has of an option that others set.
        varied = {name for arm in table(plan.get("arms")).values() for name in table(arm)}
        for key, known in wanted.items():
            told, all_differ = table(identity[key]), key == "config" and "model" in varied
            gone = [name for name in known if name not in told and (all_differ or name in varied)]
            for name in gone:
                del known[name]
    return wanted


def _differing(start: Settings, wanted: Settings, options: Mapping[str, str], cls: type) -> Settings:
    """The wanted values that differ from those at the start, without the options that the arm gives itself."""
    hints = typing.get_type_hints(cls)
    changed = {}
    for name, value in wanted.items():
        before = start[name]
        same = list(before) == value if isinstance(before, tuple) else before == value
        if name in options or same:
            continue
        changed[name] = _CANNOT if value is None and not takes_off(hints[name]) else value
    return changed


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of all arms, and below them those of one."""
    both = {**base, **own}
    nested = [
        key for key in base.keys() & own.keys() if isinstance(base[key], dict) and isinstance(own[key], dict)
    ]
    return {**both, **{key: _merged(base[key], own[key]) for key in nested}}


def _values(options: Mapping[str, str]) -> Settings:
    """Options of a recipe with values in place of texts, as far as conditions on them need it."""
    return {name: _value(text) for name, text in options.items() if name in DEFAULTS}


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if text in OFF_WORDS:
        return None
    try:
        return float(text)
    except ValueError:
        return text
