"""Checkpoints of earlier versions: what state.json lacked then, and what a newer one means.

A release that changes state.json raises VERSION, adds a step here, and a golden checkpoint in tests/golden.
"""

from __future__ import annotations

from typing import Any

from fathoms.errors import WeightsError

VERSION = 2
GUARD_COUNTS = ("skipped", "in_a_row", "overflows", "rollbacks", "jumps")
"""What the guard counts, by the names that state.json has for it."""


def check_version(version: Any, where: str) -> int:
    """The version of a state.json that this fathoms can read; any other is refused with what to do."""
    if isinstance(version, int) and version > VERSION:
        raise WeightsError(
            f"{where}: written by a newer fathoms (version {version}, this one reads up to {VERSION}); "
            "install that fathoms, or start anew with another --experiment"
        )
    if not isinstance(version, int) or version not in range(1, VERSION + 1):
        raise WeightsError(
            f"{where}: version {version!r} is none that fathoms has written; remove the folder"
        )
    return version


def bring_up(state: dict[str, Any], where: str) -> dict[str, Any]:
    """A checked state as this version has it."""
    if check_version(state.get("version"), where) == 1:
        state = _from_1(state)
    return {**state, "version": VERSION}


def _from_1(state: dict[str, Any]) -> dict[str, Any]:
    """Before the guard had a memory, and before the number of processes was kept.

    The optimizer's own momentum and a photo's share of the picture were then written as 0.9; they are None now.
    """
    counts = dict.fromkeys(GUARD_COUNTS, 0)
    identity = state.get("identity", {})
    recipe = dict(identity.get("recipe", {}))
    for name in ("momentum", "crop_pct"):
        if recipe.get(name) == 0.9:
            recipe[name] = None
    state = {**state, "identity": {**identity, "recipe": recipe}, "sums": [state["sums"]]}
    return {**state, "world": None, "steps": None, "guard": {**counts, "passed_over": [], "losses": []}}
