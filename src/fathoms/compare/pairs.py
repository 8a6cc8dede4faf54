"""The pairs of arms that a comparison tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from fathoms.compare.plan import JOINT
from fathoms.errors import ConfigError
from fathoms.names.registry import check_name

Arms = Mapping[str, Mapping[str, str]]
"""The settings of each arm, by its name."""


def pairs_of(arms: Arms, baseline: str | None) -> list[tuple[str, str]]:
    """All pairs; or each arm with the baseline; or, where that is one value of an axis, with its own counterpart.

    >>> norms = {f"norm={n}, depth={d}": {"norm": n, "depth": d} for n in ("dyt", "layernorm") for d in ("12", "36")}
    >>> pairs_of(norms, "norm=layernorm")[0]
    ('norm=dyt, depth=12', 'norm=layernorm, depth=12')
    """
    if baseline is None:
        return list(itertools.combinations(arms, 2))
    found = counterparts(arms, baseline)
    return [(name, other) for name, other in found.items() if other is not None]


def counterparts(arms: Arms, baseline: str) -> dict[str, str | None]:
    """For each arm the one that it is compared with; None where there is none. The baseline's arms are left out."""
    if baseline in arms:
        return {name: baseline for name in arms if name != baseline}
    parts = {name: parts_of(name, settings) for name, settings in arms.items()}
    at = {own: name for name, own in parts.items() if baseline in own}
    return {name: _counterpart(own, at, baseline) for name, own in parts.items() if name not in at.values()}


def parts_of(name: str, settings: Mapping[str, str]) -> tuple[str, ...]:
    """The name of an arm in its parts: its own name, which may hold commas, and a value of each axis.

    >>> parts_of("scaler, ones, depth=12", {"norm": "learnable_scaler", "norm_init": "ones", "depth": "12"})
    ('scaler, ones', 'depth=12')
    """
    parts: list[str] = []
    for option, value in reversed(list(settings.items())):
        if not name.endswith(f"{JOINT}{option}={value}"):
            break
        parts.insert(0, f"{option}={value}")
        name = name.removesuffix(JOINT + parts[0])
    return (name, *parts)


def _counterpart(parts: tuple[str, ...], at: Mapping[tuple[str, ...], str], baseline: str) -> str | None:
    """The arm with the baseline in the place of one part."""
    for place in range(len(parts)):
        if found := at.get((*parts[:place], baseline, *parts[place + 1 :])):
            return found
    return None


def check_baseline(baseline: str, arms: Arms) -> None:
    """Refuse a baseline that is neither an arm nor a value that every other arm can be compared with."""
    parts = dict.fromkeys(part for name, settings in arms.items() for part in parts_of(name, settings))
    check_name(baseline, dict.fromkeys([*arms, *parts]), "arm or value", "--baseline")
    alone = [name for name, other in counterparts(arms, baseline).items() if other is None]
    if alone:
        raise ConfigError(
            f"--baseline {baseline!r}: no arm differs from {alone[0]!r} only in it; name an arm, or leave it out"
        )
