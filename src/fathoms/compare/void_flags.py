"""Flags of a comparison that no arm would read, since an axis, every arm or the tuning sets the same option."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fathoms.compare.plan import Plan
from fathoms.errors import ConfigError, flag_of, flag_words


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
