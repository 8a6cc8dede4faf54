"""What the flags and the plan file of a comparison say: axes, arms, tuning, and the settings that all runs share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import given, merged, parse_settings
from fathoms.comparing.plan import KEYS, TABLES, Plan
from fathoms.comparing.presets import PRESETS
from fathoms.errors import ConfigError, FathomsError, flag_of, flag_words
from fathoms.machine import usable_cores
from fathoms.models.config import FIELDS
from fathoms.registry import check_name
from fathoms.training.recipe import RECIPE_FIELDS
from fathoms.untrusted import read_toml


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
    return _plan(read_toml(path, ConfigError), path)


def read_plans(preset: str | None, path: str | None) -> PlanFile | None:
    """A preset, and a plan file that adds to it and overrides it; None without either."""
    made = None
    if preset is not None:
        made = _plan(dict(PRESETS[check_name(preset, PRESETS, "preset", "--preset")]), f"--preset {preset}")
    if path is None:
        return made
    file = read_plan_file(path)
    return file if made is None else _joined(made, file)


def _joined(base: PlanFile, more: PlanFile) -> PlanFile:
    both = {**base.plan, **more.plan}
    for key in TABLES:
        if all(isinstance(each.plan.get(key), Mapping) for each in (base, more)):
            both[key] = {**base.plan[key], **more.plan[key]}
    train = dataclasses.replace(
        more.train,
        model=more.train.model or base.train.model,
        recipe=more.train.recipe or base.train.recipe,
        training=merged(base.train.training, more.train.training),
        switches=merged(base.train.switches, more.train.switches),
    )
    return PlanFile(both, train, more.baseline or base.baseline)


def _plan(table: dict[str, Any], path: str) -> PlanFile:
    """The tables of a plan file, or of a preset."""
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


_NAME = re.compile(r"[a-zA-Z][\w-]*")


def parse_axis(text: str, flag: str = "--axis") -> tuple[str, list[str]]:
    """One axis as a user writes it.

    >>> parse_axis("norm=layernorm,dyt")
    ('norm', ['layernorm', 'dyt'])
    """
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    listed = [value.strip() for value in values.split(",")]
    if not equals or not _NAME.fullmatch(name) or not all(listed):
        raise ConfigError(f"{flag} {text!r}: write NAME=VALUE,VALUE, such as norm=layernorm,dyt")
    return name, listed


def parse_axes(texts: Iterable[str], flag: str = "--axis") -> dict[str, list[str]]:
    """All axes by name; the same one twice is an error."""
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, values = parse_axis(text, flag)
        if name in axes:
            raise ConfigError(f"{flag} {name}: given twice; put all its values into one")
        axes[name] = values
    return axes


def parse_arms(texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """Arms as users write them.

    >>> parse_arms(["ones: norm=learnable_scaler,norm_init=ones"])
    {'ones': {'norm': 'learnable_scaler', 'norm_init': 'ones'}}
    """
    arms: dict[str, dict[str, str]] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        pieces = [piece.partition("=") for piece in rest.split(",")] if rest.strip() else []
        settings = {
            key.strip().removeprefix("--").replace("-", "_"): value.strip() for key, _, value in pieces
        }
        if not colon or not name.strip() or not all(key and value for key, value in settings.items()):
            raise ConfigError(
                f"--arm {text!r}: write NAME: OPTION=VALUE,OPTION=VALUE; "
                "a value with a comma in it goes into --plan FILE"
            )
        if len(settings) < len(pieces):
            raise ConfigError(f"--arm {name.strip()!r}: gives an option twice; leave one out")
        if name.strip() in arms:
            raise ConfigError(f"--arm {name.strip()!r}: given twice; use another name")
        arms[name.strip()] = settings
    return arms


def suited(args: Any, plan: Plan, earlier: Mapping[str, Any]) -> dict[str, Any] | None:
    """The recipe that suits the data and the machine; None where the flags name a recipe or a model."""
    if args.data is None or any((args.recipe, args.model, args.run.initial_checkpoint)):
        return None
    from fathoms.training.defaults import SWITCHES, starting_table

    largest = {name: max(map(int, plan.axes[name])) for name in SWITCHES if name in plan.axes}
    typed = {**given(args.training), **given(args.switches), **largest}
    runs = args.jobs or max(1, usable_cores() // 2)
    return starting_table(args.data, args.run, typed, recorded=earlier.get("base"), runs=runs)


def refuse_void_flags(
    plan: Plan, flags: Mapping[str, Any], own_axes: Collection[str], written: Mapping[str, str]
) -> None:
    """Refuse the first flag that no arm would read. Of an option that only some arms set, it is the others' value.

    Args:
        plan: The plan.
        flags: Options that flags give to all arms, with their values.
        own_axes: Axes that --axis gives; the others come from a preset, a file or the demonstration.
        written: Those of the flags that nobody typed, with the place in a file that gives them.
    """
    tied = set.intersection(*(set(arm) for arm in plan.arms.values())) if plan.arms else set()
    for name, value in flags.items():
        flag, typed = flag_of(name), written.get(name) or " ".join(flag_words(name, value))
        if name in plan.axes and name in own_axes:
            raise ConfigError(f"{flag} is an axis; leave out {typed}, or add its value to --axis {name}")
        if name in plan.axes:
            raise ConfigError(
                f"{flag} is an axis already; leave out {typed}, or set the axis yourself with --axis {name}=VALUE,VALUE"
            )
        if name in tied:
            raise ConfigError(f"{flag}: every arm sets it; leave out {typed}, or change the arms")
        if name in plan.tune:
            raise ConfigError(f"{flag} is tuned; leave out {typed}, or add its value to --tune {name}")


def parse_budget(text: str | None, flag: str = "--budget") -> float | None:
    """Seconds of a time such as 90s, 25m or 8h.

    >>> parse_budget("25m")
    1500.0
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", text.strip())
    if not found or float(found[1]) <= 0:
        raise ConfigError(f"{flag} {text!r}: write a time, such as 90s, 25m or 8h")
    return float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[found[2]]


def parse_shard(text: str | None) -> tuple[int, int]:
    """The share K of N; (1, 1) is everything."""
    if text is None:
        return 1, 1
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--shard {text!r}: write K/N with K from 1 to N, such as 3/16")
    return int(found[1]), int(found[2])
