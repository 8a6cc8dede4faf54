"""A comparison's plan file: what is compared, and under [train] the settings that all runs share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import parse_settings
from fathoms.compare.plan import KEYS
from fathoms.errors import ConfigError, FathomsError
from fathoms.files.untrusted import read_toml
from fathoms.models.config import FIELDS
from fathoms.names.registry import check_name
from fathoms.train.recipe.recipe import RECIPE_FIELDS


class PlanFile(NamedTuple):
    """A plan file, read.

    Args:
        plan: Axes, arms, tuning and seeds, as `Plan.from_dict` takes them.
        train: Flags of `fathoms train` for all runs.
        baseline: The arm that every other is compared with.
    """

    plan: dict[str, Any]
    train: train_command.Args
    baseline: str | None


def read_plan_file(path: str) -> PlanFile:
    """The file's tables; a setting that no run takes is an error that names the file."""
    if not Path(path).is_file():
        raise ConfigError(f"--plan {path}: no such file; give a TOML file")
    table = read_toml(path, ConfigError)
    for key in table:
        check_name(key, (*KEYS, "train", "baseline"), "key", path)
    train, baseline = table.pop("train", {}), table.pop("baseline", None)
    if not isinstance(train, Mapping):
        raise ConfigError(f"{path}: [train] is a table; write it as one")
    if baseline is not None and not isinstance(baseline, str):
        raise ConfigError(f"{path}: baseline is the name of an arm; {baseline!r} is not")
    return PlanFile(table, _flags(train, path), baseline)


def _flags(table: Mapping[str, Any], path: str) -> train_command.Args:
    for name, value in table.items():
        check_name(name, (*FIELDS, *RECIPE_FIELDS, "model", "recipe"), "option", f"{path}: [train]")
        if isinstance(value, list | dict):
            raise ConfigError(f"{path}: [train] {name}: give one value, as on the command line")
    try:
        return parse_settings(train_command, "train", table)
    except FathomsError as error:
        raise ConfigError(f"{path}: [train] {error}") from error
