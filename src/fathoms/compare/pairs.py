"""The pairs of arms that a comparison tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fathoms.names.registry import check_name

JOINT = ", "
"""Between the settings in the name of an arm of several axes."""


def pairs_of(names: Sequence[str], baseline: str | None) -> list[tuple[str, str]]:
    """All pairs; or each arm with the baseline; or, where that is one value of an axis, with its own counterpart.

    >>> pairs_of(["dyt, depth=12", "layernorm, depth=12", "dyt, depth=36", "layernorm, depth=36"], "layernorm")
    [('dyt, depth=12', 'layernorm, depth=12'), ('dyt, depth=36', 'layernorm, depth=36')]
    """
    if baseline is None:
        return list(itertools.combinations(names, 2))
    if baseline in names:
        return [(name, baseline) for name in names if name != baseline]
    at = {sides: name for name in names if (sides := _sides(name, baseline)) is not None}
    found = ((name, _counterpart(name, at)) for name in names if name not in at.values())
    return [(name, other) for name, other in found if other is not None]


def check_baseline(baseline: str, names: Sequence[str]) -> None:
    """Refuse a baseline that is neither an arm nor a value that every other arm can be compared with."""
    if baseline not in names and not pairs_of(names, baseline):
        values = dict.fromkeys(value for name in names for value in name.split(JOINT))
        check_name(baseline, [*names, *values], "arm or value", "--baseline")


def _sides(name: str, value: str) -> tuple[str, str] | None:
    """The words before and after a value in an arm's name; None where it is not there."""
    before, there, after = f"{JOINT}{name}{JOINT}".partition(f"{JOINT}{value}{JOINT}")
    return (before + JOINT, JOINT + after) if there else None


def _counterpart(name: str, at: dict[tuple[str, str], str]) -> str | None:
    """The arm that differs only in the baseline's value: of those whose other settings match, the closest."""
    whole = f"{JOINT}{name}{JOINT}"
    fit = [sides for sides in at if whole.startswith(sides[0]) and whole.endswith(sides[1])]
    return at[max(fit, key=lambda sides: len("".join(sides)))] if fit else None
